"""What every backend must do, as tests that take a ``target`` fixture; each test folder runs them on its own backend."""
