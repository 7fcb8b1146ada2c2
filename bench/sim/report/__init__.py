"""Report: results as numbers, tables, plots, a page. Nothing here decides a result."""
