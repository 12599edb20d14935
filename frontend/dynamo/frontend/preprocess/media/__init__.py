"""Media in requests.

| module | holds |
|---|---|
| `images` | images for models that take tokens |
| `media` | media that requests name by URLs: fetched from hosts that the operator allows |
| `pixels` | how large images are once they are decoded, as their headers say |
"""
