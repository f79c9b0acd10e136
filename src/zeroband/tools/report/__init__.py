"""The report of a run: the board's page with its data in one HTML file, plus its own sections. Reads a run folder."""
