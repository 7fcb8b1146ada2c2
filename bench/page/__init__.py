"""Page: one HTML file of tables and plots. It knows no results, only how arms look."""
