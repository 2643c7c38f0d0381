"""What makes the site: pictures, and pages made from the code."""
