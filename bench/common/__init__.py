"""Common: what the lab, real servers and every report share. One of each."""
