"""How any kernel is launched: parameters, streams, scratch, tensor maps."""
