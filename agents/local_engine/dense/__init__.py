"""Models of the Llama family without their modules: a few tensor operations a layer."""
