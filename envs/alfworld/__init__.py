"""ALFWorld: household tasks in text, native engine, reference engine, generator and experts."""
