"""What a row of data may hold: text, a conversation, tools; and how it becomes a document."""
