"""WebShop: the shop, its goals, its reward and its search, equal to the original and without Java, Lucene or HTML."""
