"""Words that everything else is said in: element types, problems, devices, settings."""
