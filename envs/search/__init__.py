"""Multi-hop search: questions answered by searching a corpus, in Search-R1's protocol."""
