"""What several rooms need and no user: errors, checks, files."""
