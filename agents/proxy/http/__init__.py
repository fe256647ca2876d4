"""The proxy's HTTP side: the Flask application, requests read, replies written."""
