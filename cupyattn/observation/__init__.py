"""What is said and saved of public calls: CUPYATTN_LOG, CUPYATTN_DUMP, and `cupyattn replay`."""
