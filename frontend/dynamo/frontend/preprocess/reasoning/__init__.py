"""How models write what they think before they answer."""
