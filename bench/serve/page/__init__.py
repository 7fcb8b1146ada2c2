"""Page: a result folder as one HTML file. Numbers come from summary.py and compare.py."""
