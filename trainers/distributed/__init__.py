"""One run in several processes: who they are, what each of them holds, plays and saves."""
