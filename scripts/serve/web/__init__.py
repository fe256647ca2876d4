"""What all servers share: who may ask, limits on connections and time, an end that loses nothing."""
