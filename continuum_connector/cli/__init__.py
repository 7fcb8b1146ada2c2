"""What an operator types: `continuum calibrate` and its like. Talks to a server, is none."""
