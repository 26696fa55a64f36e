"""What every program needs of the machine. Torch-free."""

from typing import TYPE_CHECKING

from gspo.system.imports import face

if TYPE_CHECKING:
    # fmt: off
    from gspo.system import files, heartbeat, program
    from gspo.system.clock import Clock, Every, PROFILED_STEPS, phase, timeline
    from gspo.system.files import (
        atomic_write, fsync, sha256, step_name, step_of, to_json, write_errors, write_run_file,
    )
    from gspo.system.foreign import (
        Limits, naming_panics, objects_of, parse_json, read_json, read_jsonl, read_regular, reading,
    )
    from gspo.system.foreign_yaml import parse_yaml, read_yaml
    from gspo.system.heartbeat import AwakeClock, END_SIGNAL, beat, is_stopped, limited, set_limit, stalls_logged
    from gspo.system.http import HttpServer, Json, RefusedCallError, bearer_key, finished, route
    from gspo.system.http_client import HttpClient, Reply, ReplyTooLargeError
    from gspo.system.imports import (
        NO_LAB, by_name, clone, described, face, find_function, in_lab, install_command, laboratory, source_file,
        user_lines,
    )
    from gspo.system.machine import (
        SHM, adopt_orphans, all_processes, descendants, die_with_parent, instruction_set, memory_bytes, num_cores,
        own_children, return_freed_memory, versions_and_hardware, visible_gpus,
    )
    from gspo.system.process import (
        KILLED_S, Launched, MIN_TOKEN_CHARS, TOKEN, await_killed, describe_exit, dying_with_parent, kill, kill_group,
        last_lines, shell_code, stop, stop_group, wait_and_kill_group,
    )
    from gspo.system.program import StopRequest, print_line, wait_without_spinning
    from gspo.system.text import TextRows, count, duration, flat, human, inert, number, progress, turns_text
    # fmt: on

__getattr__ = face(__name__)
