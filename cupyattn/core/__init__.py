"""Types that all other folders use: element types, problems, devices, settings."""
