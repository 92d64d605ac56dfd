"""What is odd about the columns of the silos' tables: `fl-train check-data`."""
