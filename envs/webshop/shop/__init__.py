"""What is sold, asked for and scored: products, goals, prices, reward, splits."""
