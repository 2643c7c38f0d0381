"""The documents, and in `tools` what makes their pictures, generated pages and site."""
