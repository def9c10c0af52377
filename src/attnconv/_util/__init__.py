"""Internal helpers: error messages, argument validation and files."""
