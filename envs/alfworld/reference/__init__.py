"""TextWorld as the reference engine, and the test that both engines agree."""
