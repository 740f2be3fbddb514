"""The command `mkd`: one module per subcommand, imported only when it is called."""
