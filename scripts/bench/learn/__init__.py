"""`turngym bench learn`: what every algorithm teaches tiny students."""
