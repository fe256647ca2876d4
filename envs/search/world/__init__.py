"""A seeded fictional world for multi-hop search: entities, passages about them, questions with their gold chains."""
