"""What trainers find here by name: who plays for a student in training, evaluates it and judges its turns."""
