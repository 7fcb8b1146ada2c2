"""WHAT A TRACE SAYS: read from files, as numbers and as sentences."""
