"""The shop as web pages for people, over the same environment that agents play."""
