"""What makes the site: docstrings to reStructuredText, pictures, and pages made from the code."""
