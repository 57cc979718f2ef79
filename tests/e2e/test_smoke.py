from hermes_kernel import BlockingRegistry, CellStatus


def test_state_survives_from_call_to_call(registry: BlockingRegistry) -> None:
    registry.execute("x = 6", owner="a")
    result = registry.execute("print('hi'); x * 7", owner="a")
    assert (result.status, result.value, result.stdout) == (CellStatus.OK, "42", "hi\n")
