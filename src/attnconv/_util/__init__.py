"""Internal helpers: errors, checks of arguments, files."""
