"""Reports: pages in one file, which need no server and ask none, and plots as PNG files."""
