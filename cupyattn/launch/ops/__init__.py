"""One launcher for each kernel that is not attention."""
