"""WILL IT WORK HERE: lines on a server that is not started, and what it is started with."""
