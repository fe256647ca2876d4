"""An OpenAI-compatible endpoint in front of a policy: whoever talks to it makes episodes to train on."""
