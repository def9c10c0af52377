"""A page that stands in for the one that `web/` is built into."""

PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>stand-in</title><script>const word = "</body></head>";</script></head>
<body><p>stand-in</p></body>
</html>
"""
