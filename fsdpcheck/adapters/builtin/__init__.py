"""Built-in adapters, one a file; a file whose name begins with an underscore is a part of several."""
