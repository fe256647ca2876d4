"""What each token is compared with: teachers, group advantages, returns, critics."""
