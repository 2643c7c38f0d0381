"""One engine for every call: what is asked, checked, planned, found again and launched."""
