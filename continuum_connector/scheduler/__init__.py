"""WHAT WE HOLD, and until when: pins, stores, loads, and the order of waiting turns."""
