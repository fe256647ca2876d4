"""New weights for servers that go on serving, and which version drew which token."""
