"""Breaks the code on purpose, and demands that something notices.

Each *sabotage* replaces one piece of text in a temporary copy of the tree, and a command must then fail that
passes without. What still passes is evidence that cannot fail.

    python tools/sabotage.py              # all
    python tools/sabotage.py correction   # those whose name has this in it

As many run beside each other as there are cores, each in a copy of its own.

Ends with 1 where a sabotage went unnoticed, with 2 where one does not apply (its text is not there exactly
once), its command fails without it, too, or a test ran out of time: any does on a machine that stands still
or has too much to do, and that shows nothing. Where that is how broken code is noticed, ``hangs`` says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "benchmarks", "tools", "docs", "pyproject.toml", "README.md")
LIMIT_S = 600.0
"""The longest that a command may take."""
OUT_OF_TIME = "from pytest-timeout"
"""In what pytest says of a test that took longer than it may."""


@dataclass(frozen=True)
class Sabotage:
    """One way to break the code.

    file: below the root.
    text: what is replaced, exactly once in the file.
    by: what takes its place.
    tests: pytest's arguments; it must fail.
    hangs: where it never ends that is a failure, too.
    """

    name: str
    file: str
    text: str
    by: str
    tests: tuple[str, ...]
    hangs: bool = False


BEGINNING = ("tests/app/crew/test_finish.py", "-k", "begin or took or forms or statistics or forgotten")
TWICE = ("tests/training/test_overlap.py", "-k", "buffers_once")
FIXED = ("tests/training/test_fixed.py",)
MEANWHILE = ("tests/training/test_overlap.py", "-k", "meanwhile or no_average_came or step_later")
AT_THE_END = ("tests/training/test_abreast.py", "-k", "at_their_end")
SEATS = ("tests/app/launch/test_loop.py", "-k", "number_in_the_crew or joined_anew")
ON_RAY = ("tests/app/on_ray/test_loop.py", "tests/app/on_ray/test_script.py")
RESTARTED = ("tests/app/launch/test_loop.py", "-k", "others_have_finished")
CLIENTS, SOME_CLIENTS = "tests/protocols/test_clients.py", "tests/simulation/test_clients.py"
PRESENCE = "src/ragtag/protocols/channel/presence.py"
COUNTS = ("tests/recipes/test_grouping.py", "-k", "counts_by_its_samples or parabola")
TIMES = ("tests/paper/test_grouping_claims.py",)
SCHEDULE = "src/ragtag/schedules/grouping.py"
GATE = "src/ragtag/protocols/central/grouping.py"
TOPK = ("tests/recipes/test_topk.py", "-k", "miniature")
REDUCE = "src/ragtag/protocols/rounds/reduce.py"
ROBUST = "src/ragtag/protocols/rounds/robust.py"
GUARDED = ("tests/protocols/test_robust.py", "tests/training/test_guard.py")
ROLES = "src/ragtag/optim/roles.py"
MIXING = ("tests/recipes/test_rps_theory.py", "tests/paper/test_rps_numbers.py")
TARGET = "tests/training/test_target.py"
TARGET_OF_SEVERAL = "tests/training/test_target_of_several.py"
DRAWN = ("tests/training/test_split.py", "-k", "at_random")
KEEPER = "tests/training/test_keeper.py"
PROGRESS = "src/ragtag/protocols/rounds/progress.py"
QUORUM = ("tests/protocols/test_quorum.py",)
AT_ONCE = "src/ragtag/protocols/channel/at_once.py"
OVERLAP = "src/ragtag/protocols/channel/overlap.py"
OVERLAPPED = ("tests/protocols/test_overlap.py",)
AVERAGED = "src/ragtag/training/optimizer/averaged.py"
UNHELD = ("tests/training/test_overlap.py", "-k", "quorum")
REPAIR = ("tests/protocols/test_repair.py",)
WAYS, INTERNET = "src/ragtag/recipes/internet/training.py", "tests/recipes/test_internet.py"
MOSHPIT, LAWS = (
    ("tests/recipes/test_moshpit.py", "-k", "miniature"),
    ("tests/recipes/test_moshpit.py", "-k", "laws"),
)
TRACKS = ("tests/recipes/test_rps.py", "-k", "tracks or both_sides")
REPLICAS = ("tests/recipes/test_rps_training.py", "-k", "stacked_replicas")

CORRELATION, DCORS = (
    "src/ragtag/privacy/correlation.py",
    ("tests/privacy/test_correlation.py", "-k", "test_it_is_dcors"),
)
SECAGG = "src/ragtag/protocols/secagg.py"
DP, PRIVATE, NOISED = (
    "src/ragtag/privacy/dp.py",
    "tests/privacy/test_dp.py",
    "tests/privacy/test_secagg_noise.py",
)
METERS, SPLIT = "src/ragtag/privacy/meters.py", "src/ragtag/privacy/split.py"
HIJACKING = "src/ragtag/privacy/hijacking.py"
HELD_PRIVATE = "tests/recipes/test_private.py"
CUT, HELD_SPLIT = "tests/privacy/test_split_crew.py", "tests/recipes/test_split.py"

WAYS_TCP = ("tests/protocols/test_relays_tcp.py",)
STREAMS, OVER_TCP = "src/ragtag/network/link/streams.py", ("tests/network/test_streams.py",)
RELAYS = "src/ragtag/protocols/relays.py"

MTU = ("tests/network/test_mtu.py",)
PATH = "src/ragtag/network/control/path.py"
SEALED = "src/ragtag/network/link/sealed.py"

OUTER, LEASE = "src/ragtag/training/exchange/outer.py", ("tests/training/test_ledger.py",)
IN_PART = ("tests/training/test_outer.py", "-k", "in_part")
IN_TURN = ("tests/training/test_streaming.py", "-k", "each_round_steps_one")
WAITED_FOR = ("tests/protocols/test_progress.py",)
FEEDBACK, BOOKS = "src/ragtag/codecs/sparse/feedback.py", ("tests/codecs/test_feedback.py",)

MADE_UP = ("tests/protocols/test_member.py", "-k", "made_up_in or recorded or forged")

ROUNDED = ("tests/simulation/test_transport.py", "tests/simulation/test_check_means.py", "-k", "codec")

NEXT_ROUND = ("tests/protocols/test_asking.py", "-k", "next_round or first_question or skipped")

SABOTAGES: tuple[Sabotage, ...] = (
    Sabotage(
        "catching up: one that was away owns nothing though others send it their shares",
        "src/ragtag/protocols/channel/at_once.py",
        " and all(run.key.stage != SCATTER for run in came):",
        ":",
        ("tests/protocols/test_node.py", "-k", "was_away_owns or its_last_round"),
    ),
    Sabotage(
        "catching up: one that was away owns its block to others that count it out",
        "src/ragtag/protocols/channel/at_once.py",
        "if was_away and not self._serves and",
        "if False and",
        ("tests/protocols/test_node.py", "-k", "was_away_owns or its_last_round"),
    ),
    Sabotage(
        "slow peers: one goes to a round for an average though nobody is beyond it",
        "src/ragtag/training/exchange/slow.py",
        "        if self._newest > self._round + 1:  # that one is over\n",
        "        if True:\n",
        ("tests/training/test_slow.py", "-k", "bound_on_staleness_holds"),
    ),
    Sabotage(
        "samples: a newcomer that has reported nothing tells that no epoch is over",
        "src/ragtag/training/samples/pool.py",
        " if s.reported or not s.entered}",
        "}",
        ("tests/training/test_split.py", "-k", "one_after_the_other"),
    ),
    Sabotage(
        "finish: each waits by what it has trained itself",
        "src/ragtag/app/crew/finish.py",
        "training_s = max(training_s, *(SHARE * one.trained_s for one in ends))",
        "pass",
        ("tests/app/crew/test_finish.py", "-k", "newcomer_waits"),
    ),
    Sabotage(
        "finish: a meeting leaves out those that are silent in rounds",
        "src/ragtag/app/crew/finish.py",
        'told = _tell(transport, "finish/0", mine, together)',
        'told = _tell(transport, "finish/0", mine, OpenedTogether(deadline_s))',
        ("tests/app/crew/test_finish.py", "-k", "another_one_was_given_up"),
    ),
    Sabotage(
        "demo: survivors are alike whatever they end with",
        "src/ragtag/app/demo/run.py",
        'return len(ended) == 1 and "" not in ended',
        "return True",
        ("tests/app/demo/test_result.py", "-k", "alike"),
    ),
    Sabotage(
        "demo: a death that comes after the training is none the less shown",
        "src/ragtag/app/demo/run.py",
        "min(sum(one.t > _over_t(fault, fault.t) for one in ended) for ended in rounds.values()),",
        "min(sum(one.t < fault.t for one in ended) for ended in rounds.values()),",
        ("tests/app/demo/test_result.py", "-k", "rounds_around"),
    ),
    Sabotage(
        "launch: a fault that never came is not named",
        "src/ragtag/app/launch/loop.py",
        "if late := [*self._too_late_faults, *self._injector.left]:",
        "if late := []:",
        ("tests/app/launch/test_loop.py", "-k", "or_the_runs_are_named"),
    ),
    Sabotage(
        "meeting: whoever is said to be there is not waited for",
        "src/ragtag/protocols/node.py",
        "meeting.without(presence.absent if there is None else presence.others - there | self.gone)",
        "meeting.without(presence.absent)",
        ("tests/protocols/test_node.py", "-k", "said_to_be_there"),
    ),
    Sabotage(
        "udp: a free port is not asked to be free for connections",
        "src/ragtag/network/link/udp.py",
        "if _free_over_tcp(sock.getsockname()[:2]):",
        "if True:",
        ("tests/network/test_udp.py", "-k", "free_for_connections"),
    ),
    Sabotage(
        "waiting: of an average the first part that comes decides",
        PROGRESS,
        "told[told_by] = told.get(told_by, 0) | int(np.bitwise_or.reduce(heard))",
        "told.setdefault(told_by, int(np.bitwise_or.reduce(heard)))",
        (*WAITED_FOR, "-k", "in_parts"),
    ),
    Sabotage(
        "waiting: a second stage is taken to last as long as it may",
        "src/ragtag/protocols/channel/budgets.py",
        "return self.gather.middle_s()",
        "return self.gather.budget_s()",
        ("tests/protocols/test_cut_off.py", "-k", "often"),
    ),
    Sabotage(
        "waiting: questions of the next round say nothing",
        PROGRESS,
        "if owed and owed <= self.never:",
        "if False:",
        NEXT_ROUND,
    ),
    Sabotage(
        "waiting: one question of the next round is enough",
        PROGRESS,
        "if owed and owed <= self.never:",
        "if owed:",
        NEXT_ROUND,
    ),
    Sabotage(
        "stamps: those of the reading",
        "src/ragtag/network/link/udp.py",
        "                    stamp = data\n",
        "                    stamp = _TIMESPEC.pack(*divmod(time.time_ns(), 1_000_000_000))\n",
        ("tests/network/test_udp.py", "-k", "kernel_says"),
    ),
    Sabotage(
        "traffic: flows are looked at one by one",
        "src/ragtag/network/driver/driver.py",
        "flows = list(self.engine.flows.values())",
        "flows = self.engine.flows.values()",
        ("tests/network/test_driver.py", "-k", "while_its_traffic"),
    ),
    Sabotage(
        "another place: what all opened together is opened again",
        "src/ragtag/app/crew/transport.py",
        "        if together is not None:\n            self._together.add(channel)\n",
        "",
        ("tests/app/crew/test_transport.py", "-k", "opened_together"),
    ),
    Sabotage(
        "check: means of codecs that round are not held",
        "src/ragtag/simulation/transport.py",
        'if method.kind in ("central", "published") or schema.fragments > 1 or method.hadamard:',
        'if method.kind in ("central", "published") or schema.fragments > 1 or not codec.exact:',
        ROUNDED,
    ),
    Sabotage(
        "check: means of codecs that round are held to sums alone",
        "src/ragtag/simulation/check/means.py",
        "    if not codec.exact:\n        errors",
        "    if False:\n        errors",
        ROUNDED,
    ),
    Sabotage(
        "simulator: a mean stays as long as somebody holds it",
        "src/ragtag/simulation/transport.py",
        "return self._lent(peer, came.popleft())",
        "return came.popleft()",
        ("tests/simulation/test_transport.py", "-k", "next_but_one"),
    ),
    Sabotage(
        "streams: an end that only receives answers nothing",
        STREAMS,
        "if found and stream.owes_s == math.inf:",
        "if False:",
        OVER_TCP,
    ),
    Sabotage(
        "streams: null packets are answered, too",
        STREAMS,
        "if found and stream.owes_s == math.inf:",
        "if stream.owes_s == math.inf:",
        OVER_TCP,
    ),
    Sabotage(
        "numbers: one that is made up shuts a member out",
        "src/ragtag/protocols/membership/machine.py",
        "        entry.window = ReplayWindow(opened.number, 1)\n",
        "        return False\n",
        MADE_UP,
    ),
    Sabotage(
        "numbers: any answer begins them anew",
        "src/ragtag/protocols/membership/machine.py",
        " or not self._prober.awaits(name, message.nonce):",
        ":",
        MADE_UP,
    ),
    Sabotage(
        "told: mixed chunks say nothing of it",
        REDUCE,
        "Result(**came._asdict(), judged=judged)",
        "Result(*came[:4], judged=judged)",
        ("tests/protocols/test_hadamard.py", "-k", "alone_nothing_is_told"),
    ),
    Sabotage(
        "numbers: the first of a sender is 1",
        "src/ragtag/network/link/flow.py",
        "return self.received > 0 and LEAP_MAX",
        "return LEAP_MAX",
        ("tests/network/test_flow.py", "-k", "any_number"),
    ),
    Sabotage(
        "end: a peer that comes then waits for a round",
        "src/ragtag/protocols/crew/standing.py",
        "return bool(rest) and rest <= self._board.notices(END).posts.keys()",
        "return False",
        AT_THE_END,
    ),
    Sabotage(
        "end: a state is given after rounds only",
        "src/ragtag/training/state/keeper.py",
        "            self._shelf.ended = True\n",
        "",
        AT_THE_END,
    ),
    Sabotage(
        "restarts: one that comes too late has failed",
        "src/ragtag/app/launch/loop.py",
        "(self._ending is not None or peer.number in self._too_late) and status",
        "self._ending is not None and status",
        RESTARTED,
    ),
    Sabotage(
        "restarts: one is started again when the training is over",
        "src/ragtag/app/launch/loop.py",
        "over = self._ending is not None or self._is_over(lost=peer.number)",
        "over = self._ending is not None",
        RESTARTED,
    ),
    Sabotage(
        "launcher: peers that take long to die of one error show it again and again",
        "src/ragtag/app/launch/process.py",
        "told = shortened(held) if first is None else",
        "told = shortened(held) if True else",
        ("tests/app/launch/test_process.py",),
    ),
    Sabotage(
        "a step in a compiled function is compiled, averages and all",
        "src/ragtag/training/optimizer/optimizer.py",
        "if torch.compiler.is_compiling():",
        "if False:",
        ("tests/training/test_optimizer.py", "-k", "compiled"),
    ),
    Sabotage(
        "meetings of many models push each other out",
        "src/ragtag/protocols/crew/meet.py",
        "HELD_MAX = 1024",
        "HELD_MAX = 0",
        ("tests/protocols/test_meet.py", "-k", "many_models"),
    ),
    Sabotage(
        "end: a round of one that ends is a sign that others train, where it comes after the end",
        "src/ragtag/app/crew/finish.py",
        "_newest(transport, channels), *(one.round for one in ends))",
        "_newest(transport, channels))",
        ("tests/app/crew/test_finish.py", "-k", "no_sign"),
    ),
    Sabotage(
        "end: a round of one that ends is a sign that others train, where it comes before the end",
        "src/ragtag/app/crew/finish.py",
        "            since_s, busy_s, said_s = now_s, None, 0.0",
        "            since_s, said_s = now_s, 0.0",
        ("tests/app/crew/test_finish.py", "-k", "no_sign"),
    ),
    Sabotage(
        "end: the wait is counted from one's own end",
        "src/ragtag/app/crew/finish.py",
        "            since_s, busy_s, said_s = now_s, None, 0.0",
        "            busy_s, said_s = None, 0.0",
        ("tests/app/crew/test_finish.py", "-k", "give_up_together"),
    ),
    Sabotage(
        "end: a model is as old as the oldest peer that has taken it",
        "src/ragtag/app/words.py",
        "    last = max(finals[peer].round for peer in peers)",
        "    last = min(finals[peer].round for peer in peers)",
        ("tests/app/test_models_in_words.py",),
    ),
    Sabotage(
        "end: rounds that a peer added alone count",
        "src/ragtag/app/crew/logbook.py",
        "round=max((stand.current for stand in stands), default=-1)",
        "round=max((stand.round for stand in stands), default=-1)",
        ("tests/app/crew/test_logbook.py", "-k", "kept_up"),
    ),
    Sabotage(
        "end: a peer that ends with others is alone where its last rounds were",
        "src/ragtag/app/crew/logbook.py",
        "if others := set(found.peers) - {self._rank}:",
        "if others := set[PeerId]():",
        ("tests/app/crew/test_logbook.py", "-k", "ends_with_others"),
    ),
    Sabotage(
        "end: another wait is told than is kept",
        "src/ragtag/app/crew/finish.py",
        "at_most_s = deadline_s if busy_s is None else min(deadline_s, training_s)",
        "at_most_s = deadline_s",
        ("tests/app/crew/test_finish.py", "-k", "train_on"),
    ),
    Sabotage(
        "end: of many models peers know nothing of each other",
        "src/ragtag/app/crew/finish.py",
        'told = _tell(transport, "finish/0", mine, together)',
        "told = {transport.me: mine}",
        ("tests/app/crew/test_finish.py", "-k", "number_of_models"),
    ),
    Sabotage(
        "command: an empty folder is the current one",
        "src/ragtag/app/cli/common.py",
        'if given.get(param.name) == "" and param.default != "":',
        "if False:",
        ("tests/app/cli/test_cli.py", "-k", "empty"),
    ),
    Sabotage(
        "launcher: its trace has its own numbers of peers",
        "src/ragtag/app/launch/seats.py",
        "return self._seats.get(number, trace.CREW)",
        "return number",
        SEATS,
    ),
    Sabotage(
        "launcher: one that is invited has its number at once",
        "src/ragtag/app/launch/seats.py",
        "trace.CREW if place.token is not None else place.rank",
        "place.rank",
        SEATS,
    ),
    Sabotage(
        "launcher: a fault of the network names a process",
        "src/ragtag/app/launch/seats.py",
        " if record.name in OF_PROCESSES else record",
        "",
        SEATS,
    ),
    Sabotage(
        "Ray: the trace has the launcher's numbers of peers",
        "src/ragtag/app/launch/seats.py",
        "self._seats[number] = int(told.detail)",
        "self._seats[number] = number",
        ON_RAY,
    ),
    Sabotage(
        "Ray: traces of later crews stay where they are",
        "src/ragtag/app/on_ray/actor.py",
        "for crew in crews(self._folder)",
        "for crew in [self._folder]",
        ON_RAY,
    ),
    Sabotage(
        "Ray: what a peer told last is lost",
        "src/ragtag/app/on_ray/actor.py",
        "        self._read_ready()  # what it told last\n",
        "",
        ON_RAY,
    ),
    Sabotage(
        "Ray: what a lost peer printed last is lost",
        "src/ragtag/app/on_ray/loop.py",
        "            self._print(peer, news.end.held)\n",
        "",
        ON_RAY,
    ),
    Sabotage(
        "Ray: one that was cut off for a while is waited for in vain",
        "src/ragtag/app/on_ray/loop.py",
        "if same and peer.killed:",
        "if same:",
        ON_RAY,
    ),
    Sabotage(
        "Ray: the invitation stays as it was at the start",
        "src/ragtag/app/on_ray/loop.py",
        """        if self._register.begun:
            self._book.keep(self._register.invitation())
        if came""",
        "        if came",
        ON_RAY,
    ),
    Sabotage(
        "Ray: nobody notes that an actor is lost for good",
        "src/ragtag/app/on_ray/loop.py",
        "if peer.up:  # else",
        "if False:  # else",
        ON_RAY,
    ),
    Sabotage(
        "Ray: one that is lost for good does not stop the others",
        "src/ragtag/app/on_ray/loop.py",
        "bad = ended.failed or ended.lost",
        "bad = ended.failed",
        (ON_RAY[0], "-k", "for_good_ends"),
    ),
    Sabotage(
        "Ray: a long line of a trace stops it",
        "src/ragtag/app/on_ray/actor.py",
        "TRACE_BYTES_MAX = LINE_BYTES_MAX",
        "TRACE_BYTES_MAX = 1 << 18",
        ON_RAY,
    ),
    Sabotage(
        "invite: a run's first crew is all that there is",
        "src/ragtag/app/invitation/token.py",
        "kept[-1] if kept else run_folder",
        "run_folder",
        ("tests/app/invitation/test_invite.py",),
    ),
    Sabotage(
        "report: --json leaves --out and --open out",
        "src/ragtag/app/cli/main.py",
        "if as_json and (open_ or out is not None):",
        "if False:",
        ("tests/app/cli/test_cli.py", "-k", "an_error_is_one_line"),
    ),
    Sabotage(
        "launcher: one peer that was invited averages with nobody",
        "src/ragtag/app/launch/setup.py",
        "self.n == 1 and self.token is None",
        "self.n == 1",
        ("tests/app/launch/test_loop.py", "-k", "averages_with_nobody"),
    ),
    Sabotage(
        "recipes: sentences end at the right",
        "src/ragtag/recipes/base.py",
        '"left" if i in shown.prose else "right"',
        '"right"',
        ("tests/recipes/test_base.py", "-k", "sentences"),
    ),
    Sabotage(
        "help: choices are broken amid a word",
        "src/ragtag/app/cli/leak.py",
        '        metavar="NAME",\n        help="decoder',
        '        help="decoder',
        ("tests/app/cli/test_cli.py", "-k", "fills_lines"),
    ),
    Sabotage(
        "named tensors: finite in float64 will do",
        "src/ragtag/training/named.py",
        "if not np.isfinite(_plain(value)).all():",
        "if not torch.isfinite(value).all():",
        ("tests/training/test_named.py", "-k", "given_wrongly"),
    ),
    Sabotage(
        "tcp: only where a relay would do",
        RELAYS,
        "            ways += [via for via in self._itself() if via not in ways]\n",
        "",
        WAYS_TCP,
    ),
    Sabotage(
        "tcp: for good, although UDP is back",
        RELAYS,
        "        if way.attempt or not way.sure or via == DIRECT or",
        "        if way.attempt or not way.sure or",
        WAYS_TCP,
    ),
    Sabotage(
        "tcp: a connection's end is told to nobody",
        RELAYS,
        "        if way.via == STREAM and door.at == address:\n",
        "        if False:\n",
        WAYS_TCP,
    ),
    Sabotage(
        "tcp: strangers keep what they have connected",
        STREAMS,
        "            if len(strangers) >= UNPROVEN_MAX:\n",
        "            if len(strangers) >= 10 * UNPROVEN_MAX:\n",
        OVER_TCP,
    ),
    Sabotage(
        "tcp: a full connection takes all the same",
        STREAMS,
        "        return self.connected and not self.waiting\n",
        "        return self.connected\n",
        OVER_TCP,
        hangs=True,  # the test fills it until it is full
    ),
    Sabotage(
        "tcp: any length is believed",
        STREAMS,
        "            if size > self._longest:\n",
        "            if False:\n",
        OVER_TCP,
    ),
    Sabotage(
        "tcp: members stay strangers",
        "src/ragtag/network/link/relayed.py",
        "                    self._streams.proven(source)\n",
        "                    pass\n",
        ("tests/network/test_streamed.py",),
    ),
    Sabotage(
        "tcp: two congestion controls on one path",
        PATH,
        "OverStream() if streamed else CONTROLLERS[CONTROLLER]()",
        "CONTROLLERS[CONTROLLER]()",
        ("tests/network/test_control.py", "-k", "over_tcp"),
    ),
    Sabotage(
        "tcp: membership never tries it",
        "src/ragtag/network/membership/datagrams.py",
        "            self.streams.send(data, len(data), by_stream(address))\n",
        "            pass\n",
        ("tests/network/test_datagrams.py",),
    ),
    Sabotage(
        "an owner tells an average of fewer peers than the quorum",
        REDUCE,
        "weight[few] = 0.0\n            some &= ~few",
        "some &= True",
        ("tests/simulation/test_trial.py", "-k", "quorum"),
    ),
    Sabotage(
        "peers are asked as late as rounds took that other waiting held up",
        "src/ragtag/protocols/channel/budgets.py",
        "return self.gather.middle_s()",
        "return self.gather.budget_s()",
        ("tests/simulation/test_world.py", "-k", "wait_for_each_other"),
    ),
    Sabotage(
        "deadlines may be shorter than what lines carry takes",
        "src/ragtag/protocols/channel/budgets.py",
        "HEADROOM * (trip_s + line_s)",
        "HEADROOM * trip_s",
        ("tests/simulation/test_transport.py", "-k", "over_slow_lines"),
    ),
    Sabotage(
        "the node is not told what rate control has found",
        "src/ragtag/network/link/flow.py",
        "if path.control.found else 0.0",
        "if False else 0.0",
        ("tests/network/test_drivers_on_lines.py", "-k", "found_what_the_lines_carry"),
    ),
    Sabotage(
        "keep: of several optimizers the first one alone has its rate set again",
        "src/ragtag/training/state/keeper.py",
        "        for at, averaged in enumerate(self.models):\n            step, optimizer",
        "        for at, averaged in enumerate(self.models[:1]):\n            step, optimizer",
        (KEEPER, "-k", "rates_that_were_saved"),
    ),
    Sabotage(
        "keep: what was found is loaded each time that it is kept",
        "src/ragtag/training/state/keeper.py",
        "            self._waiting.remove(name)\n",
        "",
        (KEEPER, "-k", "loaded_once"),
    ),
    Sabotage(
        "keep: a rate is set back though steps have been taken",
        "src/ragtag/training/state/keeper.py",
        "if averaged.progress[0] == step:",
        "if True:",
        (KEEPER, "-k", "loaded_once"),
    ),
    Sabotage(
        "a state is taken from any replica, also from one that is apart from most",
        "src/ragtag/training/state/keeper.py",
        "layout_hash(blob), blob, self._replica())",
        "layout_hash(blob), blob)",
        ("tests/training/test_abreast.py", "-k", "most_replicas"),
    ),
    Sabotage(
        "shares: a planner alone does not go by its own plan",
        "src/ragtag/training/planning.py",
        "known.shares(self._channel, outcome.round, trainers)",
        "known.shares(self._channel, outcome.round)",
        ("tests/training/test_planning.py", "-k", "left_with"),
    ),
    Sabotage(
        "what is kept is not told of steps that a peer left out",
        "src/ragtag/training/state/abreast.py",
        "round_ > counted + 1 and not kept.stands_aside",
        "False",
        ("tests/training/test_abreast.py", "-k", "few_that_it_missed"),
    ),
    Sabotage(
        "donors' replicas are not told apart",
        "src/ragtag/protocols/transfer/types.py",
        "return self.round, self.replica",
        "return self.round, 0",
        ("tests/protocols/test_transfer.py", "-k", "replicas"),
    ),
    Sabotage(
        "K-FAC: owners of layers exchange none",
        "src/ragtag/protocols/publish/assignment.py",
        "        if not _exchange(names[:founded], cost):\n",
        "        if True:\n",
        ("tests/optim/test_kfac_placement.py", "-k", "integer"),
    ),
    Sabotage(
        "K-FAC: each peer places by the times that it has heard itself",
        "src/ragtag/training/kfac.py",
        "self._measured.costs(seconds.tolist()) if",
        "self._measured.costs(self._measured.seconds()) if",
        ("tests/training/test_kfac.py", "-k", "measured_costs"),
    ),
    Sabotage(
        "named tensors: a name that a peer begins to take has missed turns",
        "src/ragtag/training/named.py",
        "version.clock, self._taken_since.get(name, self.clock))",
        "version.clock)",
        ("tests/training/test_kfac.py", "-k", "one_step_on"),
    ),
    Sabotage(
        "K-FAC: all images go into factors of convolutions",
        "src/ragtag/optim/kfac/layers.py",
        "images[:: self._gate.images_every]",
        "images[::1]",
        ("tests/optim/test_kfac.py", "-k", "some_images"),
    ),
    Sabotage(
        "K-FAC: all places of a patch see all of the image's borders",
        "src/ragtag/optim/kfac/patches.py",
        "products.unfold(axis, border + 1, dilation).sum(-1)",
        "products.sum(axis, keepdim=True).repeat_interleave(border // dilation + 1, axis)",
        ("tests/optim/test_kfac.py", "-k", "by_loops"),
    ),
    Sabotage(
        "K-FAC: what lies apart to the left counts as to the right",
        "src/ragtag/optim/kfac/patches.py",
        "left, right = max(0, -beside), max(0, beside)",
        "left, right = 0, abs(beside)",
        ("tests/optim/test_kfac.py", "-k", "by_loops"),
    ),
    Sabotage(
        "K-FAC: all blocks of a factor are its first one",
        "src/ragtag/optim/kfac/layers.py",
        "span = slice(sum(rows[:at]), sum(rows[: at + 1]))",
        "span = slice(0, rows[at])",
        ("tests/optim/test_kfac.py", "-k", "diagonal_blocks"),
    ),
    Sabotage(
        "K-FAC: a factor that is decomposed in blocks counts as whole",
        "src/ragtag/optim/kfac/placement.py",
        "count = 1 if self.block_rows is None else -(-n // self.block_rows)",
        "count = 1",
        ("tests/optim/test_kfac_placement.py", "-k", "in_blocks"),
    ),
    Sabotage(
        "K-FAC: an indefinite factor is inverted",
        "src/ragtag/optim/kfac/layers.py",
        "        if bool(failed.any()):\n",
        "        if False:\n",
        ("tests/optim/test_kfac.py", "-k", "indefinite"),
    ),
    Sabotage(
        "K-FAC: damping below rounding is not said",
        "src/ragtag/optim/kfac/layers.py",
        "    return needed if damping < needed else None\n",
        "    return None\n",
        ("tests/optim/test_kfac.py", "-k", "singular"),
    ),
    Sabotage(
        "K-FAC: what slow peers have made is dear",
        "src/ragtag/optim/kfac/placement.py",
        "        less = fmean(slower) if slower else 0.0\n",
        "        less = 0.0\n",
        ("tests/optim/test_kfac_placement.py", "-k", "speeds"),
    ),
    Sabotage(
        "K-FAC: the step from which a basis counts is rounded as the basis is",
        "src/ragtag/training/kfac.py",
        'return [float(byte) for byte in (number % STEPS_MAX).to_bytes(DIGITS, "big")]',
        "return [float(number % STEPS_MAX), 0.0, 0.0]",
        ("tests/training/test_kfac.py", "-k", "stamps"),
    ),
    Sabotage(
        "K-FAC: a step that is forgotten is not said",
        "src/ragtag/optim/kfac/preconditioner.py",
        "        kfac._say_forgotten()\n",
        "        pass\n",
        ("tests/optim/test_kfac.py", "-k", "forgotten"),
    ),
    Sabotage(
        "K-FAC: equal bytes are equal steps",
        "src/ragtag/recipes/kfac/recipe.py",
        "            return fmean(run.bytes_sent / run.steps for run in runs)\n",
        "            return 1.0\n",
        ("tests/recipes/test_kfac.py", "-k", "equal_bytes"),
    ),
    Sabotage(
        "outer steps: where an average came in part, momentum stays as it was",
        OUTER,
        "anchor[came], momentum[came] = table[came], grown",
        "anchor[came] = table[came]",
        IN_PART,
    ),
    Sabotage(
        "outer steps: where an average came in part, it is taken as it is",
        OUTER,
        "        table[came] = after\n",
        "",
        IN_PART,
    ),
    Sabotage(
        "outer steps: the first fragment, always",
        OUTER,
        "at = outcome.round % self._fragments",
        "at = 0",
        IN_TURN,
    ),
    Sabotage(
        "outer steps: what came of any fragment goes into the first",
        "src/ragtag/training/exchange/dense.py",
        "row = outcome.round % self.schema.fragments * len(table)",
        "row = 0",
        IN_TURN,
    ),
    Sabotage(
        "samples: what was claimed is used without a second look",
        "src/ragtag/training/samples/lease.py",
        "self.firm = joined([*self.firm, *without(self.fresh, lost)])",
        "self.firm = joined([*self.firm, *self.fresh])",
        LEASE,
    ),
    Sabotage(
        "samples: of two claims the later one wins",
        "src/ragtag/training/samples/ledger.py",
        "< (number, *me):",
        "> (number, *me):",
        LEASE,
    ),
    Sabotage(
        "samples: of two claims at once both lose",
        "src/ragtag/training/samples/ledger.py",
        "if (section.pending_number, peer, process) < (number, *me):",
        "if section.pending_number <= number:",
        LEASE,
    ),
    Sabotage(
        "rounds: one owner that went on without a peer is witness enough",
        PROGRESS,
        "if without >= WITNESSES and",
        "if without >= 1 and",
        WAITED_FOR,
    ),
    Sabotage(
        "rounds: witnesses need not be most of the others",
        PROGRESS,
        "if without >= WITNESSES and 2 * without > len(others):",
        "if without >= WITNESSES:",
        WAITED_FOR,
    ),
    Sabotage(
        "rounds: a share that went to another owner is waited for",
        PROGRESS,
        "            if (peer, block) in self._elsewhere:\n                return\n",
        "            pass\n",
        WAITED_FOR,
    ),
    Sabotage(
        "error feedback: what was not delivered is gone",
        FEEDBACK,
        "self.residual[indices] += values",
        "pass",
        BOOKS,
    ),
    Sabotage(
        "error feedback: the residual is not what receivers lack, but what was selected",
        FEEDBACK,
        "self.residual[chosen.indices] = chosen.values - values",
        "self.residual[chosen.indices] = 0.0",
        BOOKS,
    ),
    Sabotage(
        "membership: a peer in trouble does not believe that another is dead",
        "src/ragtag/protocols/membership/suspicion.py",
        "return self.since_s + 2 * rto_s + shortest_s\n",
        "return self.since_s + 2 * rto_s + doubt * shortest_s\n",
        ("tests/protocols/test_member_view.py",),
    ),
    Sabotage(
        "membership: a peer in trouble accuses others as soon",
        "src/ragtag/protocols/membership/suspicion.py",
        "rto_s + doubt * shortest_s * (1.0",
        "rto_s + shortest_s * (1.0",
        ("tests/protocols/test_member_view.py",),
    ),
    Sabotage(
        "Moshpit: the key is not advanced",
        "src/ragtag/protocols/groups/grid.py",
        "return round_ % len(self.sides)",
        "return 0",
        ("tests/protocols/test_grid.py",),
    ),
    Sabotage(
        "Moshpit: a half-empty grid passes for a full one",
        "src/ragtag/protocols/groups/grid.py",
        "return d > 1 and 1.0 - full > full**d",
        "return False",
        ("tests/protocols/test_grid.py",),
    ),
    Sabotage(
        "Moshpit: a grid may leave a peer alone on its line",
        "src/ragtag/protocols/groups/keys.py",
        "n > grid.cells or alone",
        "n > grid.cells",
        ("tests/protocols/test_moshpit.py",),
    ),
    Sabotage(
        "Moshpit's recipe: nobody is ever away",
        "src/ragtag/recipes/moshpit/run.py",
        "gone = (drawn < case.p).tolist()",
        "gone = (drawn < 0.0).tolist()",
        MOSHPIT,
    ),
    Sabotage(
        "random groups: the same ones each round",
        "src/ragtag/protocols/groups/keys.py",
        'at = random_ranks(random.stream_key(self._seed, "random groups", round_), view.peers)[',
        'at = random_ranks(random.stream_key(self._seed, "random groups", 0), view.peers)[',
        MOSHPIT,
    ),
    Sabotage(
        "groups: the sum in place of the mean",
        REDUCE,
        "                mean *= np.float32(1.0) / first\n",
        "                pass\n",
        MOSHPIT,
    ),
    Sabotage(
        "gossip: a peer takes its partner's values",
        "src/ragtag/protocols/groups/gossip.py",
        "mean = values + share.astype(np.float32)[:, None] * (theirs.values - values)",
        "mean = theirs.values",
        LAWS,
    ),
    Sabotage(
        "push-sum: a third is sent in place of half",
        "src/ragtag/protocols/groups/pushsum.py",
        "send = self._vector(target, _MASS, ask.values, ask.weight / 2, until_s)",
        "send = self._vector(target, _MASS, ask.values, ask.weight / 3, until_s)",
        LAWS,
    ),
    Sabotage(
        "rps's recipe: what is better than the baseline passes for the same",
        "src/ragtag/recipes/rps/compare.py",
        "rows.append(self._row(accuracy, below, 0.0, self._bounds.accuracy, claim))",
        'rows.append(self._row(accuracy, below, 0.0, self._bounds.accuracy, claim, "<="))',
        TRACKS,
    ),
    Sabotage(
        "rps's recipe: gradients divided by n are divided by what arrived",
        "src/ragtag/recipes/rps/training.py",
        'if self.setup.divide == "n":',
        "if False:",
        ("tests/recipes/test_rps_training.py",),
    ),
    Sabotage(
        "transfer: a damaged chunk is taken",
        "src/ragtag/protocols/transfer/chunks.py",
        "        if not event.intact:",
        "        if False:",
        ("tests/protocols/test_transfer.py",),
    ),
    Sabotage(
        "publish: what peers take is not sent before they ask",
        "src/ragtag/protocols/publish/channel.py",
        "pushes = self._push_all(now_s, ask.rows)",
        "pushes = self._push_all(now_s, ())",
        ("tests/protocols/test_publish.py", "-k", "one_latency"),
    ),
    Sabotage(
        "publish: rows on their way from their maker are asked of others",
        "src/ragtag/protocols/publish/channel.py",
        "if due_s > now_s and maker in self._remotes:",
        "if due_s > math.inf and maker in self._remotes:",
        ("tests/protocols/test_publish.py", "-k", "asked_of_nobody"),
    ),
    Sabotage(
        "publish: a newer version that is sent unasked throws an older one back",
        "src/ragtag/protocols/publish/channel.py",
        "(coming.version < version and tensor not in self._lacking)",
        "coming.version < version",
        ("tests/protocols/test_publish.py", "-k", "thrown_back"),
    ),
    Sabotage(
        "named tensors: a second owner that is the first one",
        "src/ragtag/protocols/publish/assignment.py",
        "if len(live) > 1:",
        "if False:",
        ("tests/protocols/test_assignment.py",),
    ),
    Sabotage(
        "staleness: updates come without delay",
        "src/ragtag/recipes/staleness/model.py",
        "self._rng = s, random",
        "self._rng = 0 * s, random",
        ("tests/recipes/test_staleness_model.py",),
    ),
    Sabotage(
        "all-reduce: what is lost is not asked for",
        "src/ragtag/protocols/rounds/stages.py",
        "elif self._repair is not None and (incoming.closed or incoming.overtaken):",
        "elif False:",
        ("tests/protocols/test_allreduce.py",),
    ),
    Sabotage(
        "repair: asks only when a message has ended",
        "src/ragtag/protocols/rounds/stages.py",
        "(incoming.closed or incoming.overtaken)",
        "incoming.closed",
        REPAIR,
    ),
    Sabotage(
        "repair: the share that is enough is not",
        "src/ragtag/protocols/rounds/base.py",
        "enough = 0.0 if self.repair_s is None else self.enough",
        "enough = 0.0 if self.repair_s is None else 1.0",
        REPAIR,
    ),
    Sabotage(
        "repair: a chunk that comes again counts again",
        "src/ragtag/protocols/rounds/base.py",
        "new = ~before if mask is None else mask & ~before",
        "new = ~before if mask is None else mask",
        REPAIR,
    ),
    Sabotage(
        "repair: each copy of a request is answered",
        "src/ragtag/protocols/rounds/repair.py",
        "new = run.heard > answered[parts]",
        "new = run.heard > 0",
        REPAIR,
    ),
    Sabotage(
        "probes: those that have done with one are asked in both stages",
        "src/ragtag/protocols/rounds/progress.py",
        "ended = self.begun.met or peer not in self.vain",
        "ended = peer not in self.vain",
        ("tests/protocols/test_asking.py",),
    ),
    Sabotage(
        "repair: requests do not wait for as long as answers take",
        "src/ragtag/protocols/rounds/repair.py",
        "asked.pause.again(now_s)",
        "asked.pause = Pause(now_s, self._floor_s)",
        REPAIR,
    ),
    Sabotage(
        "rate control: a window has no room for what waits in others' queue",
        "src/ragtag/network/control/bbr.py",
        "target + rate * self._others_s)",
        "target)",
        ("tests/network/test_bbr.py", "-k", "others_queue"),
    ),
    Sabotage(
        "rate control: others keep no queue that is less than half of the deepest",
        "src/ragtag/network/control/bbr.py",
        "self._lowest_s > max(_STANDING_S, _HELD * self._deepest_s)",
        "self._lowest_s > max(_STANDING_S, 0.5 * self._deepest_s)",
        ("tests/network/test_bbr.py", "-k", "good_third"),
    ),
    Sabotage(
        "rate control: a crew's own queue is others'",
        "src/ragtag/network/control/bbr.py",
        "self._lowest_s > max(_STANDING_S, _HELD * self._deepest_s)",
        "self._lowest_s > _STANDING_S",
        ("tests/network/test_bbr.py", "-k", "good_third"),
    ),
    Sabotage(
        "rate control: a queue that paths keep as they claim too much together is others'",
        "src/ragtag/network/control/path.py",
        "self.control.crowded = crowded",
        "self.control.crowded = False",
        ("tests/network/test_drivers_on_lines.py", "-k", "far_apart"),
    ),
    Sabotage(
        "rate control: a path that competes takes its own queue for the others'",
        "src/ragtag/network/control/bbr.py",
        "if self.compete is None or not stands:",
        "if True:",
        ("tests/network/test_bbr.py", "-k", "competes_only"),
    ),
    Sabotage(
        "rate control: the paths of one peer never see that others keep a queue",
        "src/ragtag/network/control/path.py",
        "crowded = several and not (known and wanted <= most < math.inf)",
        "crowded = several",
        ("tests/network/test_bbr.py", "-k", "so_do_the_paths"),
    ),
    Sabotage(
        "rate control: the first answer after a pause ends a silence",
        "src/ragtag/network/control/path.py",
        "            self._departures.clear()\n        since_s",
        "        since_s",
        ("tests/network/test_control.py", "-k", "pause"),
    ),
    Sabotage(
        "rate control: paths of one peer claim together whatever each has found alone",
        "src/ragtag/network/control/path.py",
        "min(1.0, most / wanted)",
        "1.0",
        ("tests/network/test_uplink.py", "-k", "no_more_together"),
    ),
    Sabotage(
        "rate control: a late driver makes up for all of it, whatever was lost",
        "src/ragtag/network/control/path.py",
        "most_s = min(2.0 * self._late_s, self.control.makeup_s)",
        "most_s = 2.0 * self._late_s",
        ("tests/network/test_bbr.py", "-k", "wake_rarely"),
    ),
    Sabotage(
        "rate control: what a full queue lost long before passes for the path's own",
        "src/ragtag/network/control/bbr.py",
        "if sample.rtt_s is None or sample.tx_span_s > self._deepest_s / 2.0:",
        "if sample.rtt_s is None:",
        ("tests/network/test_bbr.py", "-k", "long_after_a_full_queue"),
    ),
    Sabotage(
        "repair: requests and answers wait behind messages",
        "src/ragtag/network/link/flow.py",
        "        if outgoing.first:",
        "        if False:",
        ("tests/network/test_flow.py", "-k", "first"),
    ),
    Sabotage(
        "DDP: the sparse hook gives sums in place of means",
        "src/ragtag/hooks/sparse_hook.py",
        "share = np.float32(1 / len(messages))",
        "share = np.float32(1)",
        ("tests/hooks/test_sparse_parts.py", "-k", "mean_of_what"),
    ),
    Sabotage(
        "datagrams: a path that takes less is never noticed",
        PATH,
        "            self.mtu.shrink(self.mtu.packets)",
        "            pass",
        MTU,
    ),
    Sabotage(
        "datagrams: what fell into a black hole passes for a full queue",
        PATH,
        "            passed -= self._fallen(",
        "            self._fallen(",
        MTU,
    ),
    Sabotage(
        "datagrams: large ones may be cut on the way",
        "src/ragtag/network/link/udp.py",
        "        view = rows.reshape(-1).data\n        self._whole(per > 1)\n",
        "        view = rows.reshape(-1).data\n",
        ("tests/network/test_udp.py", "-k", "forbid"),
    ),
    Sabotage(
        "datagrams: large ones that are carried may be cut on the way",
        "src/ragtag/network/link/udp.py",
        "  # or more\n        self._whole(per > 1)\n",
        "\n",
        ("tests/network/test_udp.py", "-k", "forbid"),
    ),
    Sabotage(
        "datagrams: a packet may name another sender than its session's",
        SEALED,
        "            words[:, 0] |= np.repeat(mine, counts)\n",
        "            words[:, 0] = words[:, 0]\n",
        ("tests/network/test_sealed.py", "-k", "speaks_for_another"),
    ),
    Sabotage(
        "datagrams: a number is used twice where one was refused",
        SEALED,
        "            session.sent += len(numbers)\n",
        "            session.sent += 1\n",
        ("tests/network/test_sealed.py", "-k", "used_once or uses_up or as_they_were"),
    ),
    Sabotage(
        "persons: a member whose clock is wrong ends one that is alone",
        "src/ragtag/protocols/membership/persons.py",
        "_OUTVOTED = 2\n",
        "_OUTVOTED = 1\n",
        ("tests/protocols/test_persons.py", "-k", "that_is_alone"),
    ),
    Sabotage(
        "transfer: any round that a donor tells is asked for",
        "src/ragtag/protocols/transfer/machine.py",
        "    told = _in_step(now_s + asking_s, told)\n",
        "",
        ("tests/protocols/test_transfer.py", "-k", "far_round"),
    ),
    Sabotage(
        "transfer: the first offer is taken while most donors owe theirs",
        "src/ragtag/protocols/transfer/machine.py",
        "        return max(owed_s, self._first_offer_s",
        "        return max(0.0, self._first_offer_s",
        ("tests/protocols/test_transfer.py", "-k", "one_offer_waits"),
    ),
    Sabotage(
        "persons: one that was put out keeps its connection to a donor",
        "src/ragtag/network/transfer/session.py",
        "and now_s - self._proven_s >= _PROVEN_S:\n",
        "and now_s < 0:\n",
        ("tests/network/test_transfer.py", "-k", "put_out"),
    ),
    Sabotage(
        "transfer: a donor's pace counts from rounds of before a restart",
        "src/ragtag/network/transfer/donor.py",
        "        if new < self._looked_round:  #",
        "        if new < -1:  #",
        ("tests/network/test_transfer.py", "-k", "rounds_anew"),
    ),
    Sabotage(
        "transfer: a snapshot of before a restart is given to newcomers",
        "src/ragtag/protocols/transfer/snapshots.py",
        "            self.round = -1\n            self._snapshots.clear()\n",
        "            self.round = -1\n",
        ("tests/protocols/test_transfer_shelf.py", "-k", "begin_anew"),
    ),
    Sabotage(
        "transfer: a connection that was reset at once ends a donor",
        "src/ragtag/network/transfer/donor.py",
        "        with contextlib.suppress(OSError):  # macOS:",
        "        with contextlib.suppress(KeyError):  # macOS:",
        ("tests/network/test_transfer.py", "-k", "that_was_reset"),
    ),
    Sabotage(
        "invitations: one without any key uses up what is for those that have one",
        "src/ragtag/protocols/membership/entry.py",
        "        return self._anybody.take(self.core.now_s)\n",
        "        return self._strangers.take(self.core.now_s)\n",
        ("tests/protocols/test_persons.py", "-k", "without_any_key"),
    ),
    Sabotage(
        "notices: one without any key uses up what is for those that have one",
        "src/ragtag/protocols/membership/machine.py",
        "            if notice is not None and self._admission.hears_strangers():\n",
        "            if self._admission.hears_strangers() and notice is not None:\n",
        ("tests/protocols/test_persons.py", "-k", "without_any_key"),
    ),
    Sabotage(
        "persons: a word that a name is taken ends a member",
        "src/ragtag/protocols/membership/entry.py",
        "            if self.persons.passes is None or self.persons.outvoted(opened.source_epoch):\n",
        "            if opened:\n",
        ("tests/protocols/test_persons.py", "-k", "words_without_proof"),
    ),
    Sabotage(
        "persons: a record without proof ends the member of its name",
        "src/ragtag/protocols/membership/view.py",
        "        if later and (record is None or self.may_be_in(record, self.mine)):\n",
        "        if later:\n",
        ("tests/protocols/test_persons.py", "-k", "words_without_proof"),
    ),
    Sabotage(
        "persons: any person takes a name that lives",
        "src/ragtag/protocols/membership/persons.py",
        "        return known.status >= Status.DEAD or card.person == before.person\n",
        "        return True\n",
        ("tests/protocols/test_persons.py", "-k", "words_without_proof"),
    ),
    Sabotage(
        "persons: a member's own card, in a made-up record, takes its place",
        "src/ragtag/protocols/membership/persons.py",
        "            return record.epoch == known.epoch and record.name != self._view.mine.name\n",
        "            return True\n",
        ("tests/protocols/test_persons.py", "-k", "words_without_proof"),
    ),
    Sabotage(
        "sessions: a key of small order ends the thread of whoever sends to it",
        "src/ragtag/protocols/sealing/sessions.py",
        "                except HandshakeError:  # a member may tell any 32 bytes as its key\n",
        "                except KeyError:\n",
        ("tests/protocols/sealing/test_sessions.py", "-k", "share_a_secret"),
    ),
    Sabotage(
        "guards: nobody is taken for a liar",
        ROBUST,
        "return math.ceil(guard.liars * peers - 1e-9)",
        "return 0",
        GUARDED,
    ),
    Sabotage(
        "guards: any weight is believed",
        ROBUST,
        "counted = believed(claimed, self._guard.heaviest)",
        "counted = claimed",
        GUARDED,
    ),
    Sabotage(
        "guards: liars may be most of what came",
        ROBUST,
        "(counted > 0).sum(axis=0) >= 2 * f + 1",
        "(counted > 0).sum(axis=0) > 0",
        GUARDED,
    ),
    Sabotage(
        "quorum: fewer make an average, too",
        REDUCE,
        "np.bitwise_count(self._heard[span]) < self.spec.quorum",
        "np.bitwise_count(self._heard[span]) < 1",
        QUORUM,
    ),
    Sabotage(
        "quorum: a straggler is waited for as long as deadlines have room",
        PROGRESS,
        "late = self._enough_s >= self.until_s",
        "late = True",
        QUORUM,
    ),
    Sabotage(
        "quorum: nobody is waited for once it is there",
        PROGRESS,
        "now_s + (self.begun.cycle_s + now_s - self._began_s) / there",
        "now_s",
        QUORUM,
    ),
    Sabotage(
        "overlap: past a quorum a wait costs from the first",
        "src/ragtag/protocols/channel/budgets.py",
        "return StageTimes(scatter_s, gather_s, left_s=0.0)",
        "return StageTimes(scatter_s, gather_s, left_s=0.0, cycle_s=cycle_s)",
        (*QUORUM, "-k", "costs_nothing"),
    ),
    Sabotage(
        "overlap: a share may be too late before its average is due",
        "src/ragtag/protocols/channel/budgets.py",
        "        if free_s > 0:\n",
        "        if False:\n",
        (*QUORUM, "-k", "no_share_is_too_late"),
    ),
    Sabotage(
        "overlap: the second stage has no part of it",
        "src/ragtag/protocols/channel/budgets.py",
        "free_s = max(0.0, overlap_s - self.usual_gather_s)",
        "free_s = overlap_s",
        (*QUORUM, "-k", "no_share_is_too_late"),
    ),
    Sabotage(
        "overlap: the last question counts",
        OVERLAP,
        "            self._begun_s = math.nan\n",
        "",
        OVERLAPPED,
    ),
    Sabotage(
        "overlap: the longest of late counts",
        OVERLAP,
        "return min(self._went_on_s, default=0.0)",
        "return max(self._went_on_s, default=0.0)",
        OVERLAPPED,
    ),
    Sabotage(
        "overlap: a live trainer that looks whether a round is over asks for nothing",
        "src/ragtag/app/crew/transport.py",
        """        self.overlap.asked(self.driver.now_s())
        return self.future.done()""",
        "        return self.future.done()",
        ("tests/app/crew/test_transport.py", "-k", "went_on_beside"),
    ),
    Sabotage(
        "overlap: simulated trainers that wait ask for nothing",
        "src/ragtag/simulation/transport.py",
        """        self._overlap.asked(self._crew.world.now_s)
        return self._crew.outcome(self._me, self._channel)""",
        "        return self._crew.outcome(self._me, self._channel)",
        ("tests/training/test_overlap.py", "-k", "average_is_due"),
    ),
    Sabotage(
        "overlap: a simulated trainer that looks whether a round is over asks for nothing",
        "src/ragtag/simulation/transport.py",
        """        self._overlap.asked(self._crew.world.now_s)
        return self._crew.is_over(self._me, self._channel)""",
        "        return self._crew.is_over(self._me, self._channel)",
        UNHELD,
    ),
    Sabotage(
        "following: in groups, too, where nobody sees the others' rounds",
        "src/ragtag/training/exchange/combine.py",
        """        FOLLOWING,
        GROUPS,
        "in""",
        """        FOLLOWING,
        CENTRE,
        "in""",
        ("tests/training/test_combine.py",),
    ),
    Sabotage(
        "quorum: steps wait for the average that is due",
        AVERAGED,
        "return self._since >= delay and (not self.asked.averager.quorum or self._under_way.over)",
        "return self._since >= delay",
        UNHELD,
    ),
    Sabotage(
        "following: others that have begun to average are not followed",
        "src/ragtag/training/optimizer/scheduling.py",
        "others_began=self._began is not None and self._began(),",
        "",
        ("tests/training/test_overlap.py", "-k", "follow_the_first"),
    ),
    Sabotage(
        "following: a live peer does not see that others have begun",
        "src/ragtag/app/crew/transport.py",
        "return channel in self._opened and self._driver.node.newer(channel)",
        "return False",
        ("tests/app/crew/test_transport.py", "-k", "others_have_begun"),
    ),
    Sabotage(
        "following: a peer follows at once",
        "src/ragtag/schedules/every.py",
        "early = self.follows and progress.others_began and since >= self.least",
        "early = self.follows and progress.others_began",
        ("tests/schedules/test_every.py",),
    ),
    Sabotage(
        "quorum: fewer wait once more for an average that is due",
        "src/ragtag/protocols/channel/budgets.py",
        "return StageTimes(scatter_s, gather_s, left_s=0.0)",
        "return StageTimes(scatter_s, gather_s, left_s)",
        (*QUORUM, "-k", "is_due"),
    ),
    Sabotage(
        "quorum: what deadlines have learned lengthens the wait for an average that is due",
        "src/ragtag/protocols/channel/budgets.py",
        "self.scatter.floor_s if due else scatter_s",
        "scatter_s",
        (*QUORUM, "-k", "is_due"),
    ),
    Sabotage(
        "quorum: the next average waits for the one under way, and so do steps",
        AVERAGED,
        "if self.asked.partial or (delay and self.asked.averager.quorum):",
        "if self.asked.partial:",
        UNHELD,
    ),
    Sabotage(
        "NoLoCo: Nesterov's look ahead, which it has not",
        WAYS,
        '"outer": Outer(lr=0.7, momentum=0.5, nesterov=False),',
        '"outer": Outer(lr=0.7, momentum=0.5),',
        (INTERNET, "-k", "step_by_step"),
    ),
    Sabotage(
        "SparseLoCo: everything is sent",
        WAYS,
        'TopK(64 / CHUNK, "chunked"',
        'TopK(0.5, "chunked"',
        (INTERNET, "-k", "hundredth"),
    ),
    Sabotage(
        "nopeek recipe: dCor of all training samples beside that of fewer held out",
        "src/ragtag/recipes/nopeek/training.py",
        "train = samples.train_x[: len(held)]",
        "train = samples.train_x",
        ("tests/recipes/test_nopeek.py", "-k", "few_epochs"),
    ),
    Sabotage(
        "moshpit recipe: so few seeds that random groups pass",
        "src/ragtag/recipes/moshpit/plan.py",
        "ERRORS_SEEDS = 6",
        "ERRORS_SEEDS = 3",
        ("tests/recipes/test_moshpit.py", "-k", "in_the_grids_place"),
    ),
    Sabotage(
        "grouping recipe: what a peer keeps for itself is in the crew's model",
        "src/ragtag/recipes/grouping/training.py",
        "0 if joins and heard.bit_count() > 1 else",
        "0 if joins or heard.bit_count() else",
        ("tests/recipes/test_without_a_pace.py", "-k", "is_seen"),
    ),
    Sabotage(
        "dedloc: a step has each peer's last batch for all of its samples",
        "src/ragtag/training/optimizer/modes.py",
        "total.add_(gradient, alpha=self.batch)",
        "total.copy_(gradient).mul_(self._gathered + self.batch)",
        ("tests/recipes/test_dedloc.py", "-k", "half_of_their"),
    ),
    Sabotage(
        "internet: a quorum that leaves peers out passes by a loss that is near",
        "src/ragtag/recipes/internet/compare.py",
        "1.0, SAME,",
        "1.0, 0.01,",
        (INTERNET, "-k", "who_is_there"),
    ),
    Sabotage(
        "internet: no peer is ever missing",
        WAYS,
        "< self.missing",
        "< 0.0",
        (INTERNET, "-k", "share_of_rounds or train_on"),
    ),
    Sabotage(
        "roles: what an owner receives costs nothing",
        ROLES,
        "np.diag(c.sum() - c - 1)",
        "0 * np.diag(c.sum() - c - 1)",
        ("tests/optim/test_roles.py", "-m", "not slow"),
    ),
    Sabotage(
        "grouping: no correction for staleness at the owner",
        GATE,
        "self.speeds.grouping.scale(share, max(stale.values()))",
        "self.speeds.grouping.scale(share, 0)",
        COUNTS,
    ),
    Sabotage(
        "grouping: no correction for staleness in the schedule",
        SCHEDULE,
        "return min(share, inverse(staleness))",
        "return share",
        COUNTS,
    ),
    Sabotage(
        "grouping: the sum of a group's updates in place of their mean",
        GATE,
        "batch.total[some] *= (scale / batch.mass[some])[:, None]",
        "batch.total[some] *= scale",
        COUNTS,
    ),
    Sabotage(
        "grouping: a straggler that is alone counts twice",
        SCHEDULE,
        "return sum(rate[peer] for peer in group) / sum(rate.values())",
        "group = list(group)\n    return (1 + (len(group) == 1)) * sum(map(rate.__getitem__, group))"
        " / sum(rate.values())",
        COUNTS,
    ),
    Sabotage(
        "joining: newcomers that meet begin the crew before they can have heard of it",
        "src/ragtag/protocols/crew/joining.py",
        "self._begins_s = now_s + min(LISTEN_S, (self._until_s - now_s) / 2)",
        "self._begins_s = now_s",
        ("tests/simulation/test_crew.py", "-k", "restarted"),
    ),
    Sabotage(
        "donor: a host that has all places keeps them",
        "src/ragtag/network/transfer/donor.py",
        "if most < hosts[newcomer.host] + 2:",
        "if True:",
        ("tests/network/test_transfer_fuzz.py", "-k", "no_host_holds"),
    ),
    Sabotage(
        "donor: a newcomer may ask on and on",
        "src/ragtag/network/transfer/session.py",
        'raise Closed("asked twice for the same")',
        "return",
        ("tests/network/test_transfer.py", "-k", "on_and_on"),
    ),
    Sabotage(
        "shelf: what is read stays for ever",
        "src/ragtag/protocols/transfer/snapshots.py",
        " or now_s - s.put_s >= self._enough_s(s)]",
        "]",
        ("tests/protocols/test_transfer_shelf.py", "-k", "without_end"),
    ),
    Sabotage(
        "board: one peer's numbers move the others' clocks as far as they like",
        "src/ragtag/protocols/crew/board.py",
        "max(clock, min(posted.number, clock + _STEP_MAX))",
        "max(clock, posted.number)",
        ("tests/protocols/test_board.py", "-k", "uses_up"),
    ),
    Sabotage(
        "epochs: a state that is given before the first split tells nothing of what was used",
        "src/ragtag/training/samples/epochs.py",
        "splits = {**self._restored, **made}",
        "splits = made",
        ("tests/training/test_epochs.py", "-k", "before_the_first_split"),
    ),
    Sabotage(
        "resume: of a state that came from a peer a file is named that is not there",
        "src/ragtag/app/crew/peer.py",
        "return Found(None, holders[0]",
        'return Found(folder / f"peer {holders[0]}", holders[0]',
        ("tests/app/crew/test_several.py", "-k", "disks_differ"),
    ),
    Sabotage(
        "finish: a peer that takes the others' model keeps its count of averages",
        "src/ragtag/app/crew/peer.py",
        "return last if self._finished is None else max(",
        "return last if True else max(",
        ("tests/app/crew/test_finish.py", "-k", "agree_on_the_crews_step"),
    ),
    Sabotage(
        "finish: one that tells a far round moves the step of all",
        "src/ragtag/training/state/whole.py",
        "if round_ <= median_high(rounds) + CATCH_UP)",
        "if round_ <= max(rounds) + CATCH_UP)",
        ("tests/app/crew/test_finish.py", "-k", "far_round"),
    ),
    Sabotage(
        "finish: peers that never trained have a voice",
        "src/ragtag/training/state/whole.py",
        "stand in stands.items() if stand.trained} or stands",
        "stand in stands.items()}",
        ("tests/training/test_whole.py", "-k", "do_not_undo"),
    ),
    Sabotage(
        "finish: what a model has counted stays each peer's own",
        "src/ragtag/app/crew/finish.py",
        "if what.counters is not None",
        "if False",
        ("tests/app/crew/test_finish.py", "-k", "has_counted"),
    ),
    Sabotage(
        "finish: the last mean is of those that train on, too",
        "src/ragtag/app/crew/finish.py",
        "together = OpenedTogether(deadline_s, ended)",
        "together = OpenedTogether(deadline_s)",
        ("tests/app/crew/test_finish.py", "-k", "of_those_that_have_ended"),
    ),
    Sabotage(
        "channel: those that did not open it with the others own blocks of it",
        "src/ragtag/protocols/channel/at_once.py",
        "elsewhere if among is None else elsewhere | (self._crew.live - among)",
        "elsewhere",
        ("tests/protocols/test_asking.py", "-k", "probe_without_those"),
    ),
    Sabotage(
        "channel: a round that is heard of before it is begun has the owners of the one before",
        "src/ragtag/protocols/channel/at_once.py",
        "live = crew.live - self._set_aside - self._apart or crew.live",
        "live = crew.live - self._aside or crew.live",
        ("tests/protocols/test_node.py", "-k", "not_begun_yet"),
    ),
    Sabotage(
        "optimizers: a peer that is away averages those beside its first one",
        "src/ragtag/training/state/abreast.py",
        "averaged.is_apart = partial(self._leaves_out, averaged.name)",
        "pass",
        ("tests/training/test_back_again.py", "-k", "comparison"),
    ),
    Sabotage(
        "schedules: a step that others wait for is told when posts are due",
        "src/ragtag/training/optimizer/scheduling.py",
        "            self._pacer.post()  # others may wait for this very step",
        "            pass  # others may wait for this very step",
        ("tests/training/test_scheduling.py", "-k", "whatever_a_post_takes"),
    ),
    Sabotage(
        "finish: what one that ends had claimed is lost to the others",
        "src/ragtag/app/crew/peer.py",
        "            self.data.give_back()  #",
        "            #",
        ("tests/app/crew/test_finish.py", "-k", "had_claimed"),
    ),
    Sabotage(
        "epochs: one that lies is believed",
        "src/ragtag/training/samples/answers.py",
        "by_two = sorted(told.values())[-2:-1] or [0]",
        "by_two = sorted(told.values())[-1:] or [0]",
        ("tests/training/test_epochs.py", "-k", "ends_the_training"),
    ),
    Sabotage(
        "rounds: one that tells far ones is believed each time",
        "src/ragtag/protocols/channel/far_rounds.py",
        "self._patience[peer] = 2 * patience",
        "self._patience[peer] = patience",
        ("tests/protocols/test_far_rounds.py", "-k", "logarithm"),
    ),
    Sabotage(
        "push-sum: what one peer sends is kept without end",
        "src/ragtag/protocols/groups/pushsum.py",
        "if len(by_round) == _ROUNDS_SEEN:",
        "if False:",
        ("tests/protocols/test_pushsum.py", "-k", "keeps_out_nobody"),
    ),
    Sabotage(
        "plans: one peer's use up the room of all",
        "src/ragtag/protocols/channel/shares.py",
        "if plan.channel not in told and len(told) >= PLANS_MAX:",
        "if plan.channel not in told and sum(map(len, self._known.values())) >= PLANS_MAX:",
        ("tests/protocols/test_shares.py", "-k", "keeps_out_nobody"),
    ),
    Sabotage(
        "board: one peer's topics use up the room of all",
        "src/ragtag/protocols/crew/board.py",
        "there = sum(peer in posts for posts in self._posts.values())",
        "there = len(self._posts)",
        ("tests/protocols/test_board.py", "-k", "keep_out_nobody or have_room"),
    ),
    Sabotage(
        "samples: a peer tells of as many processes as it likes",
        "src/ragtag/training/samples/ledger.py",
        "or (who not in self.sections and self._told(peer) >= TOLD_MAX)",
        "",
        (*LEASE, "-k", "many_processes"),
    ),
    Sabotage(
        "groups: anybody answers for a host",
        "src/ragtag/protocols/groups/channel.py",
        "return peer in search.hosts[: -(-search.tries // TRIES)]",
        "return True",
        ("tests/protocols/test_groups.py", "-k", "no_host_has"),
    ),
    Sabotage(
        "joining: the probe to which peers come from their meetings is the one that is timed",
        "src/ragtag/protocols/crew/joining.py",
        "if event.round < LAST_PROBE:",
        "if event.round < 0:",
        ("tests/simulation/test_transport.py", "-k", "measures_lines"),
    ),
    Sabotage(
        "rounds: a peer that owns nothing does not wait again for the owner of all",
        "src/ragtag/protocols/rounds/progress.py",
        "awaited = self.waited_for if owns else self._awaited & self._owners",
        "awaited = self.waited_for",
        ("tests/protocols/test_progress.py", "-k", "owns_nothing"),
    ),
    Sabotage(
        "kfac: a peer that was frozen publishes for the step after its own",
        "src/ragtag/training/kfac.py",
        "max(self._next(step), self._steps.begun())",
        "max(self._next(step), self._steps.begun() * 0)",
        ("tests/training/test_kfac.py", "-k", "frozen_publishes and wide_net"),
    ),
    Sabotage(
        "groups: a probe leaves a host's wait as it was before it",
        "src/ragtag/protocols/groups/channel.py",
        "self._host.wait = Deadline(probe_s)",
        "self._host.wait = getattr(self._host, 'wait', Deadline(probe_s))",
        ("tests/protocols/test_groups.py", "-k", "after_a_probe"),
    ),
    Sabotage(
        "steps: each channel leaves out rounds by itself",
        PRESENCE,
        "return max(number, self._step) if channel in self._before else number",
        "return number",
        ("tests/protocols/test_steps.py",),
    ),
    Sabotage(
        "steps: a channel that is opened anew goes on where it was",
        "src/ragtag/protocols/channel/at_once.py",
        "self._crew.steps.opened(self._number)",
        "pass",
        ("tests/protocols/test_steps.py", "-k", "anew"),
    ),
    Sabotage(
        "clients: they own as much as all others",
        PRESENCE,
        "return tuple(int(peer in places) for peer in range(max(places) + 1))",
        "return tuple(1 for peer in range(max(places) + 1))",
        (CLIENTS, "-k", "evenly or cut_alike"),
    ),
    Sabotage(
        "clients: they own what was planned for them",
        PRESENCE,
        "others = tuple(0 if peer in clients else share for peer, share in enumerate(plan))",
        "others = plan",
        (CLIENTS, "-k", "planned_for_a_client"),
    ),
    Sabotage(
        "clients: rows go through them",
        "src/ragtag/protocols/channel/averager.py",
        "return self.live - self.clients or self.live, self.present - self.clients or self.present",
        "return self.live, self.present",
        (CLIENTS, "-k", "rows"),
    ),
    Sabotage(
        "clients: a central state's blocks are theirs, too",
        "src/ragtag/protocols/central/owners.py",
        "return peer not in self._clients, self._rank(peer)[block], peer",
        "return True, self._rank(peer)[block], peer",
        (CLIENTS, "-k", "central"),
    ),
    Sabotage(
        "clients: they compute named tensors for all",
        "src/ragtag/training/named.py",
        "live = live - self._transport.clients or live",
        "live = live or live",
        (SOME_CLIENTS, "-k", "named_tensor"),
    ),
    Sabotage(
        "clients: their shares leave as if others' came",
        "src/ragtag/protocols/rounds/stages.py",
        "return self.waiting.until_s if self.content.mine else self.waiting.round_until_s",
        "return self.waiting.until_s",
        (SOME_CLIENTS, "-k", "slow_line"),
    ),
    Sabotage(
        "shares: nobody repeats a plan",
        "src/ragtag/training/planning.py",
        "            self._repeat(outcome,",
        "            (lambda *_: None)(outcome,",
        ("tests/training/test_planning.py", "-k", "unlike_lines"),
    ),
    Sabotage(
        "shares: one that lies is believed",
        "src/ragtag/protocols/channel/shares.py",
        "if times >= min(TELLERS, trainers)]",
        "if times >= 1]",
        ("tests/training/test_planning.py", "-k", "alone_tells"),
    ),
    Sabotage(
        "shares: a planner waits for a plan of anybody's",
        "src/ragtag/training/planning.py",
        "        own = known.told(self._transport.me, self._channel)",
        "        own = known.told(3, self._channel)",
        ("tests/training/test_planning.py", "-k", "alone_tells"),
    ),
    Sabotage(
        "clients: they wait as owners do",
        "src/ragtag/protocols/channel/budgets.py",
        "if not owns:\n            scatter_s = 0.0",
        "if not owns:\n            pass",
        (CLIENTS, "-k", "no_longer_than_that"),
    ),
    Sabotage(
        "clients: those that are early go on alone",
        "src/ragtag/protocols/rounds/progress.py",
        "if self.stage != (SCATTERING if owns else GATHERING) or",
        "if self.stage != SCATTERING or",
        (SOME_CLIENTS, "-k", "client_that_dies"),
    ),
    Sabotage(
        "clients: owners that have not gone on yet are counted among them",
        "src/ragtag/protocols/rounds/progress.py",
        "told, awaited = self._told, self._awaited & self._owners",
        "told, awaited = self._told, self._awaited",
        ("tests/protocols/test_outvoted.py", "-k", "clients"),
    ),
    Sabotage(
        "clients: a crew of nobody else is no error",
        "src/ragtag/protocols/crew/joining.py",
        "if others and not card.role.owns and not entry.roster.owned:",
        "if others and not card.role.owns and not entry.roster.trains:",
        ("tests/protocols/test_joining.py", "-k", "test_row"),
    ),
    Sabotage(
        "clients: the state is fetched from them",
        "src/ragtag/simulation/transport.py",
        "living = sorted(self._node.live - {self.me} - self._node.clients)",
        "living = sorted(self._node.live - {self.me})",
        (SOME_CLIENTS, "-k", "fetched_from_none"),
    ),
    Sabotage(
        "clients: they are planned for as others",
        "src/ragtag/training/planning.py",
        "owns_none = peer in clients",
        "owns_none = False",
        ("tests/training/test_planning.py", "-k", "clients"),
    ),
    Sabotage(
        "grouping: shares by heads in place of samples",
        SCHEDULE,
        "return sum(rate[peer] for peer in group) / sum(rate.values())",
        "return len(list(group)) / len(rate)",
        COUNTS,
    ),
    Sabotage(
        "grouping: one group for ever in place of progressive ones",
        "src/ragtag/training/exchange/central.py",
        "return self.schedule.groups(good, now) if good else ()",
        "return (tuple(sorted(good)),) if good else ()",
        (*TIMES, "-k", "a_straggler_costs_little"),
    ),
    Sabotage(
        "grouping: no barrier inside a group",
        GATE,
        "if not self._missing(block, batch):\n            if len",
        "if True:\n            if len",
        (*TIMES, "-k", "table_of_groups"),
    ),
    Sabotage(
        "n-softsync: a fixed rate where 1/tau is asked for",
        "src/ragtag/schedules/softsync.py",
        "scale = inverse(arrival.staleness) if self.corrected else 1.0",
        "scale = 1.0",
        (*TIMES, "-k", "only_the_corrected_rate"),
    ),
    Sabotage(
        "n-softsync: twice as many updates to a step",
        "src/ragtag/schedules/softsync.py",
        "return peers // self.n",
        "return min(peers, 2 * peers // self.n)",
        (*TIMES, "-k", "staleness_under_n_softsync"),
    ),
    Sabotage(
        "backup workers: all are waited for",
        "src/ragtag/schedules/backup.py",
        "close=arrival.held >= arrival.n - self.spare",
        "close=arrival.held >= arrival.n",
        ("tests/recipes/test_without_a_pace.py", "-k", "leave_the_straggler_out"),
    ),
    Sabotage(
        "Ringmaster: nothing is too old",
        "src/ragtag/schedules/asynchronous.py",
        "arrival.staleness >= self.discard_from",
        "arrival.staleness < 0",
        ("tests/recipes/test_without_a_pace.py", "-k", "leave_the_straggler_out"),
    ),
    Sabotage(
        "rps: sums in place of means",
        REDUCE,
        "np.divide(mean, weight[:, None], out=mean, where=some[:, None])",
        "pass",
        MIXING,
    ),
    Sabotage(
        "rps: owners that do not rotate",
        "src/ragtag/protocols/rounds/layout.py",
        'random.permutation(random.stream_key(seed, "owners", round_), n)',
        "tuple(range(n))",
        MIXING,
    ),
    Sabotage(
        "leaving: a split that is under way goes on",
        "src/ragtag/training/samples/portion.py",
        "        self._of.require_in()\n",
        "",
        ("tests/app/crew/test_surface.py", "-k", "after_leaving_a_step"),
    ),
    Sabotage(
        "leaving: epochs that are under way go on",
        "src/ragtag/app/crew/crew.py",
        '                self._peer.require_in("counting epochs")\n',
        "",
        ("tests/app/crew/test_surface.py", "-k", "after_leaving_a_step"),
    ),
    Sabotage(
        "overlap: gradients of which no average came stay those of the next step",
        "src/ragtag/training/exchange/dense.py",
        "if moved or not outcome.averaged.all():",
        "if moved:",
        ("tests/training/test_overlap.py",),
    ),
    Sabotage(
        "overlap: what changed meanwhile is lost where buffers are corrected",
        "src/ragtag/training/exchange/dense.py",
        "table = np.add(sent, table, out=sent)",
        "table = table",
        ("tests/training/test_overlap.py",),
    ),
    Sabotage(
        "overlap: buffers are again what was sent, with the gradients",
        "src/ragtag/training/exchange/dense.py",
        "if part.kind in _GIVEN:",
        "if part.kind:",
        MEANWHILE,
    ),
    Sabotage(
        "overlap: gradients that were gathered meanwhile are in the average under way",
        "src/ragtag/training/exchange/dense.py",
        "if part.kind in _GIVEN:",
        "if part.kind == PRESENT:",
        MEANWHILE,
    ),
    Sabotage(
        "ending: those that began have open already what one that came later opens",
        "src/ragtag/training/state/whole.py",
        'return Whole(f"{self._name}/begin", self._parts, self._transport)',
        "return self",
        ("tests/app/crew/test_finish.py", "-k", "came_later"),
    ),
    Sabotage(
        "beginning: differences are to weights that this peer has no more",
        "src/ragtag/training/optimizer/averaged.py",
        "            self.sparse.anchor_here()",
        "            pass",
        BEGINNING,
    ),
    Sabotage(
        "beginning: a crew too large to take one peer's weights says that it does",
        "src/ragtag/app/crew/finish.py",
        """why = f"in a crew of more than {PEERS_MAX} nobody takes another's\"""",
        'why = ""',
        BEGINNING,
    ),
    Sabotage(
        "beginning: what is frozen stays each peer's own",
        "src/ragtag/training/tensors/modules.py",
        "if (trainable or not parameter.requires_grad) and",
        "if trainable and",
        BEGINNING,
    ),
    Sabotage(
        "beginning: integers stay each peer's own",
        "src/ragtag/training/optimizer/averaged.py",
        "buffers=given and self._buffers",
        "buffers=False",
        BEGINNING,
    ),
    Sabotage(
        "beginning: parameters that no optimizer has stay each peer's own",
        "src/ragtag/training/optimizer/averaged.py",
        "trainable=given",
        "trainable=False",
        BEGINNING,
    ),
    Sabotage(
        "beginning: what other optimizers have is nobody's",
        "src/ragtag/training/optimizer/averaged.py",
        "averaged = [*self.parameters, *elsewhere]",
        "averaged = self.parameters",
        BEGINNING,
    ),
    Sabotage(
        "nobody is told of parameters that no optimizer has",
        "src/ragtag/app/crew/peer.py",
        "self._tell_beside(self.models[number])",
        "pass",
        BEGINNING,
    ),
    Sabotage(
        "parameters are told to be in no optimizer before the loop has made all of them",
        "src/ragtag/app/crew/peer.py",
        "_PASSES = 2",
        "_PASSES = 1",
        BEGINNING,
    ),
    Sabotage(
        "beginning: buffers are not compared",
        "src/ragtag/app/crew/crew.py",
        "initial = None if model is not None else digest_of(parameters)",
        "initial = digest_of(parameters)",
        BEGINNING,
    ),
    Sabotage(
        "beginning: buffers of other shapes are carried, too",
        "src/ragtag/app/crew/finish.py",
        "elif held is fixed and not formed_alike(begun):",
        "elif False:",
        BEGINNING,
    ),
    Sabotage(
        "outbox: what is repaired of a done round has later values",
        "src/ragtag/network/link/outbox.py",
        "if run.key.round <= self._done.get(run.key.channel, -1):",
        "if False:",
        ("tests/network/test_outbox.py", "-k", "repaired"),
    ),
    Sabotage(
        "streamed: a full socket wakes nobody for relayed datagrams",
        "src/ragtag/network/link/streamed.py",
        "self._await_room(left < len(data))",
        "pass",
        ("tests/network/test_streamed.py", "-k", "room"),
    ),
    Sabotage(
        "solitude: two that own no block are alone where the owner dies",
        "src/ragtag/app/crew/logbook.py",
        "if not self.in_a_row and set(outcome.waited_for) - set(outcome.missed):",
        "if False:",
        ("tests/app/crew/test_solitude.py",),
    ),
    Sabotage(
        "DDP: a peer that takes the others' model keeps its integers",
        "src/ragtag/hooks/crew_hook.py",
        "self._integers.take()",
        "pass",
        ("tests/hooks/test_crew_away.py", "-k", "integers"),
    ),
    Sabotage(
        "fixed: DDP's peers keep integers of their own",
        "src/ragtag/hooks/crew_hook.py",
        "Fixed(name, integers, self._transport).average(1.0 if first else 0.0)",
        "pass",
        ("tests/hooks/test_crew_away.py", "-k", "integers"),
    ),
    Sabotage(
        "fixed: values lose bits on the way",
        "src/ragtag/training/state/fixed.py",
        ".view(torch.int16).float()",
        ".view(torch.int16).bfloat16().float()",
        FIXED,
    ),
    Sabotage(
        "fixed: each round brings the first one's values",
        "src/ragtag/training/state/fixed.py",
        "min(own.numel(), (done + more) // size), place // 2",
        "min(own.numel(), (done + more) // size), 0",
        FIXED,
    ),
    Sabotage(
        "overlap: each optimizer corrects the buffers of one model",
        "src/ragtag/training/exchange/dense.py",
        "first = [now == before for now, before in times]",
        "first = [True for _ in times]",
        TWICE,
    ),
    Sabotage(
        "overlap: a crew's optimizers do not know of each other's corrections",
        "src/ragtag/app/crew/crew.py",
        "siblings=peer.siblings,",
        "siblings=None,",
        TWICE,
    ),
    Sabotage(
        "rps: a user's optimizer takes no average",
        "src/ragtag/training/exchange/dense.py",
        "self.bucket.restore(table, outcome.averaged, row)",
        "self.bucket.restore(table, outcome.averaged & False, row)",
        REPLICAS,
    ),
    Sabotage(
        "top-k: the k smallest",
        "src/ragtag/codecs/sparse/topk.py",
        "return largest_of(u, at_least(u, least)[0], k)",
        'return select_at(u, np.sort(np.argsort(np.abs(u), kind="stable")[:k]))',
        TOPK,
    ),
    Sabotage(
        "top-k: the largest is left out",
        "src/ragtag/codecs/sparse/topk.py",
        "return largest_of(u, at_least(u, least)[0], k)",
        "return largest_of(u * (np.abs(u) < np.abs(u).max()), at_least(u, least)[0], k)",
        TOPK,
    ),
    Sabotage(
        "DropCompute: the threshold is not looked at",
        "src/ragtag/schedules/dropcompute.py",
        "return Average() if late or",
        "return Average() if",
        ("tests/recipes/test_without_a_pace.py", "-k", "joins_with_what_it_has"),
    ),
    Sabotage(
        "privacy: squared distances in place of distances",
        CORRELATION,
        "return found.sqrt_()",
        "return found",
        DCORS,
    ),
    Sabotage(
        "privacy: distances that are not centred",
        CORRELATION,
        "return (means - inner).clamp_min(0)",
        "return means",
        DCORS,
    ),
    Sabotage(
        "privacy: a gradient without its own variance's part",
        CORRELATION,
        "weights.sub_(_centred(distances[mine], means[mine], at).mul_(own[mine].to(kind)))",
        "pass",
        ("tests/privacy/test_correlation.py", "-k", "gradient_is_right"),
    ),
    Sabotage(
        "privacy: blocks that forget their place",
        CORRELATION,
        "found[torch.arange(len(here), device=points.device), here] = 0.0",
        "found[torch.arange(len(here)), torch.arange(len(here))] = 0.0",
        ("tests/privacy/test_correlation.py", "-k", "blocks"),
    ),
    Sabotage(
        "privacy: NoPeek takes what was evaluated for what is trained",
        "src/ragtag/privacy/nopeek.py",
        """        if torch.is_grad_enabled():
            if not isinstance(made""",
        """        if True:
            if not isinstance(made""",
        ("tests/privacy/test_nopeek.py", "-k", "evaluation"),
    ),
    Sabotage(
        "private: NoPeek is seen when training begins only",
        DP,
        "        if said := _coupled(self._model):",
        "        if said := None:",
        (PRIVATE, "-k", "nopeek_watches"),
    ),
    Sabotage(
        "private: NoPeek is seen in steps only",
        DP,
        "        if said := _coupled(model):",
        "        if said := None:",
        (PRIVATE, "-k", "nopeek_watches"),
    ),
    Sabotage(
        "private: the sizes of batches leave as weights",
        DP,
        "if isinstance(optimizer, CrewOptimizer) and isinstance(optimizer._averaged.weight, BySamples):",
        "if False:",
        (PRIVATE, "-k", "weight_by_samples"),
    ),
    Sabotage(
        "private: a ledger by the rank",
        "docs/privacy.md",
        'PrivacyLedger("hospital A", "privacy.json")',
        'PrivacyLedger(f"hospital {crew.rank}", f"privacy-{crew.rank}.json")',
        ("tests/app/test_readme.py", "-k", "by_a_rank"),
    ),
    Sabotage(
        "private: steps without noise",
        DP,
        "parameter.grad = (total + noise.to(total).view_as(total)) / self.batch_size",
        "parameter.grad = total / self.batch_size",
        (PRIVATE, "-k", "clipped_sum or what_leaves"),
    ),
    Sabotage(
        "private: gradients that are not the samples' go out",
        DP,
        "if found is None and parameter.grad is not None:",
        "if False:",
        (PRIVATE, "-k", "anything_but"),
    ),
    Sabotage(
        "private: a rollback gives epsilon back",
        DP,
        "if steps > counts.spent.get(key, 0)",
        "if True",
        (PRIVATE, "-k", "rollback"),
    ),
    Sabotage(
        "private: what a batch costs is forgotten",
        DP,
        "self.ledger.spend(self.noise_multiplier, self.rate)",
        "pass",
        (PRIVATE, "-k", "drawn"),
    ),
    Sabotage(
        "private: what is spent is known to this process only",
        DP,
        "write_whole(counts.path, [text.encode()], mode=0o600)",
        "pass",
        (PRIVATE, "-k", "restart"),
    ),
    Sabotage(
        "private: a ledger that a process makes again counts for itself",
        DP,
        "if counts is None or counts.process != os.getpid():",
        "if True:",
        (PRIVATE, "-k", "goes_on_counting"),
    ),
    Sabotage(
        "private: who resumes another's checkpoint has its own epsilon from nowhere",
        "src/ragtag/training/state/keeper.py",
        "        self._grow(self.extra)\n",
        "        pass\n",
        ("tests/app/crew/test_private.py", "-k", "newest_checkpoint"),
    ),
    Sabotage(
        "private: batch norm without weights is let in",
        DP,
        "isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training",
        "isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine",
        (PRIVATE, "-k", "batch_norm"),
    ),
    Sabotage(
        "private: integer noise of another shape",
        "src/ragtag/privacy/noise.py",
        "return np.asarray(steps % np.uint64(2) == 1)",
        "return np.asarray(steps % np.uint64(3) == 1)",
        ("tests/privacy/test_noise.py", "-k", "discrete"),
    ),
    Sabotage(
        "private: noise of peers that may drop out is counted on",
        "src/ragtag/privacy/secagg.py",
        "self._counted_on = n - dropouts - colluders",
        "self._counted_on = n",
        (NOISED, "-k", "dropouts or normal"),
    ),
    Sabotage(
        "private: vectors longer than is counted",
        "src/ragtag/privacy/secagg.py",
        "flat = _within(flat, self._noise.max_norm)",
        "flat = flat + 0",
        (NOISED, "-k", "clipped_vectors"),
    ),
    Sabotage(
        "private: half of what is sent is counted",
        "src/ragtag/recipes/private/training.py",
        "+= effect.run.payload.nbytes",
        "+= effect.run.payload.nbytes // 2",
        ("tests/recipes/test_private.py", "-k", "counted_as_by"),
    ),
    Sabotage(
        "private: the best seed is judged",
        "src/ragtag/recipes/private/recipe.py",
        "row(noised, min(hidden[noised])",
        "row(noised, max(hidden[noised])",
        ("tests/recipes/test_private.py", "-k", "misses"),
    ),
    Sabotage(
        "private: an inversion that goes the wrong way",
        "src/ragtag/privacy/inversion.py",
        "x.grad = gradient.sign()",
        "x.grad = -gradient.sign()",
        ("tests/privacy/test_inversion.py", "-k", "gives_its_sample_away"),
    ),
    Sabotage(
        "privacy: a hijacker that pushes codes away",
        HIJACKING,
        "- self._pull * like",
        "+ self._pull * like",
        ("tests/privacy/test_hijacking.py", "-k", "servers_pull or digits"),
    ),
    Sabotage(
        "privacy: a hijacker's critic learns from the pull",
        HIJACKING,
        "p.detach() for name, p in self.critic",
        "p for name, p in self.critic",
        ("tests/privacy/test_hijacking.py", "-k", "critic_learns"),
    ),
    Sabotage(
        "privacy: a hijacked client's own layers are trained",
        HIJACKING,
        "front, private_x, public_x = copy.deepcopy(front).train(),",
        "front, private_x, public_x = front.train(),",
        ("tests/privacy/test_hijacking.py", "-k", "digits"),
    ),
    Sabotage(
        "privacy: a hijacker's decoder learns other samples",
        HIJACKING,
        "self.decoder(encoded), public)",
        "self.decoder(encoded), public.flip(0))",
        ("tests/privacy/test_hijacking.py", "-k", "digits"),
    ),
    Sabotage(
        "leak: updates that are given do not count",
        "src/ragtag/app/cli/leak.py",
        "return model, x, y, dict(rest[0])",
        "return model, x, y, None",
        ("tests/app/cli/test_leak.py", "-k", "updates_of_a"),
    ),
    Sabotage(
        "privacy: leakage of training samples",
        METERS,
        "dcor=float(distance_correlation(held.double(), held_z)),",
        "dcor=float(distance_correlation(train.double(), train_z)),",
        ("tests/privacy/test_meters.py", "-k", "training_samples"),
    ),
    Sabotage(
        "privacy: samples that were trained on count as held out",
        METERS,
        "if key not in known]",
        "if True]",
        ("tests/privacy/test_meters.py", "-k", "left_out"),
    ),
    Sabotage(
        "privacy: the worse decoder counts",
        METERS,
        "min(errors, key=errors.__getitem__)",
        "max(errors, key=errors.__getitem__)",
        ("tests/privacy/test_meters.py", "-k", "better_of_both"),
    ),
    Sabotage(
        "secure aggregation: a share fewer than the threshold suffices",
        SECAGG,
        "polynomial = [secret, *(draw(prime) for _ in range(threshold - 1))]",
        "polynomial = [secret, *(draw(prime) for _ in range(threshold - 2))]",
        ("tests/protocols/test_secagg.py", "-k", "fewer_shares"),
    ),
    Sabotage(
        "secure aggregation: both neighbours add their mask",
        SECAGG,
        "masks.append((key, 1 if self.me < peer else -1))",
        "masks.append((key, 1))",
        ("tests/protocols/test_secagg.py", "-k", "exact"),
    ),
    Sabotage(
        "secure aggregation: masks that are left go unseen",
        SECAGG,
        "return bool(block[self._span :].any())",
        "return False",
        ("tests/protocols/test_secagg.py", "-k", "not_cancel"),
    ),
    Sabotage(
        "secure aggregation: a share of the key goes out with a client that is in the sum",
        SECAGG,
        "out.append(bytes([_SEED]) + self._held[peer][:SHARE_BYTES])",
        "out.append(bytes([_KEY]) + self._held[peer][SHARE_BYTES:])",
        ("tests/protocols/test_secagg.py", "-k", "never_gives_both"),
    ),
    Sabotage(
        "secure aggregation: a secret is not held to what its owner told",
        SECAGG,
        "if genuine(secret):",
        "if True:",
        ("tests/protocols/test_secagg.py", "-k", "forged_share"),
    ),
    Sabotage(
        "secure aggregation: a client helps with a sum of few",
        SECAGG,
        "if len(inside) < setting.survivors_min:\n            return f",
        "if False:\n            return f",
        ("tests/protocols/test_secagg.py", "-k", "judges"),
    ),
    Sabotage(
        "secure aggregation: parts of the ring are unmasked alone",
        SECAGG,
        "if not setting.hangs_together(inside):",
        "if False:",
        ("tests/protocols/test_secagg.py", "-k", "no_neighbour_between"),
    ),
    Sabotage(
        "secure aggregation: a client whose parts came late ends without the sum",
        SECAGG,
        '            self._held = {}\n            return b""',
        '            return "it is not in the sum"',
        ("tests/protocols/test_secagg.py", "-k", "came_late"),
    ),
    Sabotage(
        "secure aggregation: a stage's deadline as a difference of rounded times",
        SECAGG,
        "if ends and now_s < until_s:",
        "if ends and now_s - self._begun_s < most_s:",
        ("tests/protocols/test_secagg.py", "-k", "stage_ends_at_its_deadline"),
    ),
    Sabotage(
        "secure aggregation: an owner's deadline as a difference of rounded times",
        SECAGG,
        "few = len(there) < self._setting.survivors_min and now_s < until_s",
        "few = len(there) < self._setting.survivors_min and now_s - self._owned_s < self._waits.most_s",
        ("tests/protocols/test_secagg.py", "-k", "owner_waits_no_longer"),
    ),
    Sabotage(
        "secure aggregation: the rounding overflows",
        SECAGG,
        "((1 << 31) - 1) / room",
        "((1 << 33) - 1) / room",
        ("tests/protocols/test_secagg.py", "-k", "quantised_values"),
    ),
    Sabotage(
        "secure aggregation: colluders come to both secrets",
        SECAGG,
        "both = n * _tail(n - 1, colluders, degree, 2 * threshold - degree - 1)",
        "both = n * _tail(n - 1, colluders, degree, 2 * threshold - degree + 1)",
        ("tests/protocols/test_secagg.py", "-k", "chances"),
    ),
    Sabotage(
        "secure aggregation: dropouts of a neighbourhood are not counted",
        SECAGG,
        "lacking = n * _tail(n - 1, dropouts, degree, degree - threshold)",
        "lacking = n * _tail(n - 1, dropouts, degree, degree - threshold + 2)",
        ("tests/protocols/test_secagg.py", "-k", "chances"),
    ),
    Sabotage(
        "secure aggregation: each block has the words of the first",
        SECAGG,
        'begin = (first // _CIPHER_WORDS).to_bytes(16, "big")',
        "begin = bytes(16)",
        ("tests/protocols/test_secagg.py", "-k", "part_of_a_mask"),
    ),
    Sabotage(
        "secure aggregation: blocks are added up over different clients",
        SECAGG,
        "if found[0] == inside}",
        "if True}",
        ("tests/protocols/test_secagg.py", "-k", "sends_parts"),
    ),
    Sabotage(
        "secure aggregation: the aggregator takes other words of masks off than an owner",
        SECAGG,
        "add_masks(total, self._masks, block * self._setting.stride)",
        "add_masks(total, self._masks)",
        ("tests/protocols/test_secagg.py", "-k", "cost_no_block"),
    ),
    Sabotage(
        "secure aggregation: anybody opens a block",
        SECAGG,
        "may = known and one.client in (self._openers[one.block], self._setting.aggregator)",
        "may = known",
        ("tests/protocols/test_secagg.py", "-k", "owner_alone"),
    ),
    Sabotage(
        "secure aggregation: nothing is learned of how long stages take",
        SECAGG,
        "if seen < (_FEW if what == SecureStage.KEYS.name else 1):",
        "if True:",
        ("tests/protocols/test_secagg.py", "-k", "later_round_waits"),
    ),
    Sabotage(
        "secure averages: a message of the next round is lost",
        "src/ragtag/privacy/secagg.py",
        "if number <= current:",
        "if True:",
        ("tests/privacy/test_secagg_crew.py", "-k", "lost_datagrams"),
    ),
    Sabotage(
        "secure averages: anybody speaks for anybody",
        "src/ragtag/privacy/secagg.py",
        "if maker == self._transport.me or not self._speaks(what, peer, maker):",
        "if maker == self._transport.me:",
        ("tests/privacy/test_secagg_crew.py", "-k", "another_peers_name"),
    ),
    Sabotage(
        "split learning: the graph crosses the cut",
        SPLIT,
        "return values.detach().clone().requires_grad_()",
        "values.retain_grad() if values.requires_grad else values.requires_grad_()\n        return values",
        ("tests/privacy/test_split.py", "-k", "nothing_but_values"),
    ),
    Sabotage(
        "split learning: an answer to an earlier batch is taken for this one's",
        SPLIT,
        "if found is not None and found.number == number:",
        "if found is not None:",
        ("tests/privacy/test_split_crew.py", "-k", "as_in_one_process or server_that_freezes"),
    ),
    Sabotage(
        "split learning: the server waits for each client in turn",
        SPLIT,
        '        found = self._cut.newest("codes", client)\n'
        "        if found is None or found.number <= self._seen[client]:\n            return False",
        '        found = self._cut.newest("codes", client)\n'
        "        while found is None or found.number <= self._seen[client]:\n"
        "            self._cut.transport.pause(0.001)\n"
        "            if client not in self._cut.transport.live or self.served[client].finished:\n"
        "                return False\n"
        '            found = self._cut.newest("codes", client)',
        ("tests/privacy/test_split_crew.py", "-k", "freezes_is_passed"),
    ),
    Sabotage(
        "split learning: layers of the server that are frozen learn",
        SPLIT,
        ".requires_grad_(p.requires_grad) for name, p in named}",
        ".requires_grad_(p.is_floating_point()) for name, p in named}",
        (CUT, "-k", "frozen_stay"),
    ),
    Sabotage(
        "split learning: gradients that are not finite stay in layers that have no optimizer",
        SPLIT,
        "        self._optimizer.zero_grad()\n        self.middle.zero_grad()",
        "        self._optimizer.zero_grad()",
        (CUT, "-k", "spoil_the_server"),
    ),
    Sabotage(
        "split learning: statistics of a turn are lost",
        SPLIT,
        "                    buffer.copy_(state[name])",
        "                    pass",
        (CUT, "-k", "keep_statistics"),
    ),
    Sabotage(
        "split learning: no end to waiting for an answer",
        SPLIT,
        "            if now_s >= until_s:",
        "            if False:",
        ("tests/privacy/test_split_crew.py", "-k", "server_that_dies"),
        hangs=True,
    ),
    Sabotage(
        "split learning: a standby begins with the layers that it was made with",
        SPLIT,
        "            _take_state(self.middle, found.values)\n",
        "",
        (CUT, "-k", "newest_copy or not_needed"),
    ),
    Sabotage(
        "split learning: a server that was replaced goes on",
        SPLIT,
        "self.replaced = self._serving() > self._place",
        "self.replaced = False",
        (CUT, "-k", "comes_back"),
    ),
    Sabotage(
        "split learning: copies follow each other without a rest",
        SPLIT,
        "self._wait(source, budgets.typical_s() * (1 / COPIES_SHARE - 1), deadline_s)",
        "self._wait(source, 0.0, deadline_s)",
        (CUT, "-k", "share_of_the_time"),
    ),
    Sabotage(
        "split learning: clients take no answers from a standby",
        SPLIT,
        "if way in self._downs:",
        "if False:",
        (CUT, "-k", "where_the_server_dies"),
    ),
    Sabotage(
        "split learning: the first server that answered counts, not the last",
        SPLIT,
        "for place in reversed(range(len(self.servers)))",
        "for place in range(len(self.servers))",
        (CUT, "-k", "one_server_after_the_other or where_the_server_dies"),
    ),
    Sabotage(
        "split learning: standbys hand no copies on",
        SPLIT,
        "            self._copy(False, deadline_s)\n            transport.pause(",
        "            transport.pause(",
        (CUT, "-k", "copies_for_one"),
    ),
    Sabotage(
        "split learning: of several servers each keeps its layers to itself",
        SPLIT,
        "share = 1 / len(cut.servers)",
        "share = 0.0",
        (CUT, "-k", "do_not_part"),
    ),
    Sabotage(
        "split learning: clients of a dead server are nobody's",
        SPLIT,
        "return 0 if found is None else int(found.loss)",
        "return 0",
        (CUT, "-k", "several_servers_that_dies"),
    ),
    Sabotage(
        "split learning: codes of another width go out, and are read as labels",
        SPLIT,
        "if codes.shape != (len(x), *form.codes):",
        "if False:",
        (CUT, "-k", "fit"),
    ),
    Sabotage(
        "split learning: each message goes out twice, in a crew",
        SPLIT,
        "        self.tensors.publish({name: flat})\n",
        "        self.tensors.publish({name: flat})\n        self.tensors.publish({name: flat})\n",
        (CUT, "-k", "formula_says or word_of_it"),
    ),
    Sabotage(
        "split recipe: each message goes out twice",
        SPLIT,
        "        self.tensors.publish({name: flat})\n",
        "        self.tensors.publish({name: flat})\n        self.tensors.publish({name: flat})\n",
        (HELD_SPLIT, "-k", "whoever_has"),
    ),
    Sabotage(
        "split recipe: labels go up in a message of their own in the U-shaped form",
        SPLIT,
        """        made = self._ask("codes", codes, "outputs", number)
""",
        """        self._cut.send("outputs.grad", self._me, 0, y[:, None].float())
        made = self._ask("codes", codes, "outputs", number)
""",
        (HELD_SPLIT, "-k", "u_shaped_crew"),
    ),
    Sabotage(
        "split learning: codes of the U-shaped form take labels along",
        SPLIT,
        "label = math.prod(self.labels) if self.outputs is None else 0",
        "label = math.prod(self.labels)",
        (CUT, "-k", "formula_says and shaped"),
    ),
    Sabotage(
        "private recipe: a step in an epoch is not counted in epsilon",
        DP,
        """            self.ledger.spend(self.noise_multiplier, self.rate)
            self._drawn = sizes[number]
""",
        """            if number:
                self.ledger.spend(self.noise_multiplier, self.rate)
            self._drawn = sizes[number]
""",
        (HELD_PRIVATE, "-k", "is_the_plans"),
    ),
    Sabotage(
        "private recipe: epsilon is for half the rate at which samples are drawn",
        DP,
        "            self.ledger.spend(self.noise_multiplier, self.rate)\n",
        "            self.ledger.spend(self.noise_multiplier, self.rate / 2)\n",
        (HELD_PRIVATE, "-k", "is_the_plans"),
    ),
    Sabotage(
        "private recipe: messages of secure averages leave twice",
        "src/ragtag/privacy/secagg.py",
        "        self._transport.publish(Publish(self._channel, found, clock=clock))",
        """        for _ in range(2):
            self._transport.publish(Publish(self._channel, found, clock=clock + _))""",
        (HELD_PRIVATE, "-k", "measured and secure"),
    ),
    Sabotage(
        "private recipe: sums over clients are the recipe's own",
        "src/ragtag/recipes/private/training.py",
        "updates = _secure_sums(each, setup.seed)",
        "updates = {name: g.sum(1) for name, g in each.items()}",
        (HELD_PRIVATE, "-k", "that_secure_averages_give"),
    ),
    Sabotage(
        "private recipe: epsilon of the first seed is judged",
        "src/ragtag/recipes/private/recipe.py",
        """    for result in of_method(results, "federated, private"):
""",
        """    for result in of_method(results, "federated, private")[:1]:
""",
        (HELD_PRIVATE, "-k", "not_counted"),
    ),
    Sabotage(
        "split recipe: a client computes its layers twice",
        SPLIT,
        """        codes = self.front(x)
        self._require_fit(""",
        """        codes = self.front(x) + 0 * self.front(x)
        self._require_fit(""",
        (HELD_SPLIT, "-k", "u_shaped_crew"),
    ),
    Sabotage(
        "split recipe: what clients hand on is not counted",
        "src/ragtag/recipes/split/training.py",
        "self.handed_bytes += hand_over(",
        "self.handed_bytes += 0 * hand_over(",
        (HELD_SPLIT, "-k", "in_turn"),
    ),
    Sabotage(
        "split recipe: clients in turn begin with weights of their own",
        "src/ragtag/recipes/split/training.py",
        "        if client != self.last:",
        "        if False:",
        (HELD_SPLIT, "-k", "whole_nets"),
    ),
    Sabotage(
        "split recipe: the U-shaped form is trained as the plain one",
        "src/ragtag/recipes/private/training.py",
        """    u_shaped = "U-shaped" in setup.method
""",
        """    u_shaped = False
""",
        (HELD_SPLIT, "-k", "u_shaped_crew"),
    ),
    Sabotage(
        "split recipe: the best seed is judged",
        "src/ragtag/recipes/split/recipe.py",
        "max(r.apart for r in mine)",
        "min(r.apart for r in mine)",
        (HELD_SPLIT, "-k", "roundings"),
    ),
    Sabotage(
        "split recipe: a standby that never serves passes",
        "src/ragtag/recipes/split/recipe.py",
        'float("inf") if r.taken_s is None',
        "0.0 if r.taken_s is None",
        (HELD_SPLIT, "-k", "costs_more"),
    ),
    Sabotage(
        "private: another model is averaged without noise",
        "src/ragtag/app/crew/crew.py",
        "            if id(averaged) not in named:",
        "            if False:",
        ("tests/app/crew/test_private.py", "-k", "without_noise"),
    ),
    Sabotage(
        "target batch: a batch's gradient is not weighed by its samples",
        "src/ragtag/training/optimizer/modes.py",
        "            if self.batch != 1:\n                total.mul_(self.batch)\n",
        "",
        (TARGET, "-k", "one_process"),
    ),
    Sabotage(
        "target batch: peers count the same, whatever their samples",
        "src/ragtag/training/optimizer/modes.py",
        "return weight if self._weigh is None else weight * gathered",
        "return weight",
        (TARGET, "-k", "one_process"),
    ),
    Sabotage(
        "target batch: what others have is carried on without a bound",
        "src/ragtag/schedules/target.py",
        "return min(2.0 * self.samples if in_s == 0.0 else self.most, told + batches * self.batch)",
        "return told + batches * self.batch",
        ("tests/schedules/test_target.py",),
    ),
    Sabotage(
        "target batch: samples that are dropped are not said",
        "src/ragtag/training/optimizer/account.py",
        "        self._drop(pending, why)\n",
        "",
        (TARGET, "-k", "checkpoint or hours"),
    ),
    Sabotage(
        "split: each peer shuffles by its own random numbers",
        "src/ragtag/training/samples/loader.py",
        "                _seed(generators, key)\n",
        "",
        DRAWN,
    ),
    Sabotage(
        "split: a sampler's own generator is left as it is",
        "src/ragtag/training/samples/loader.py",
        "(torch.default_generator, *found)",
        "(torch.default_generator,)",
        DRAWN,
    ),
    Sabotage(
        "split: a loader that is made anew has a split of its own",
        "src/ragtag/app/crew/data.py",
        "if alike and 0 < made.turn < turn",
        "if False and 0 < made.turn < turn",
        ("tests/app/crew/test_data.py", "-k", "newcomer or behind"),
    ),
    Sabotage(
        "split: a loader that is made anew takes the place of one of this epoch",
        "src/ragtag/app/crew/data.py",
        "0 < made.turn < turn and not self.epochs.went_through(made.portion)",
        "0 < made.turn",
        ("tests/app/crew/test_data.py", "-k", "keep_to_their_own"),
    ),
    Sabotage(
        "leave: a driver that died is not closed, and nothing is recorded",
        "src/ragtag/app/crew/peer.py",
        "                stands += [what",
        "                rest.pop_all()\n                stands += [what",
        ("tests/app/crew/test_peer.py",),
    ),
    Sabotage(
        "target batch: samples of an average that failed are in no count",
        "src/ragtag/training/optimizer/averaged.py",
        "                self.accounting.failed()\n",
        "                pass\n",
        (TARGET, "-k", "average_that_failed"),
    ),
    Sabotage(
        "target batch: an average that fails takes along what was gathered meanwhile",
        "src/ragtag/training/optimizer/averaged.py",
        "            finally:\n                back()\n",
        "            finally:\n                pass\n",
        (TARGET, "-k", "under_way_that_fails"),
    ),
    Sabotage(
        "target batch: gradients of a step that is over go into the next one",
        "src/ragtag/training/optimizer/account.py",
        "return 0.0 if late else 1.0",
        "return 1.0",
        (TARGET, "-k", "given_to_none"),
    ),
    Sabotage(
        "target batch: a peer's K-FAC begins rounds of factors at its own batches",
        "src/ragtag/optim/kfac/preconditioner.py",
        "if self._waits and not self._peers.in_step():",
        "if False:",
        ("tests/training/test_kfac.py", "-k", "cost_nobody"),
    ),
    Sabotage(
        "target batch: a peer without a batch takes no part in rounds of factors",
        "src/ragtag/optim/kfac/preconditioner.py",
        "                self._do(missed)",
        "                pass",
        ("tests/training/test_kfac.py", "-k", "cost_nobody"),
    ),
    Sabotage(
        "target batch: of several optimizers only the one that leads averages",
        "src/ragtag/training/optimizer/siblings.py",
        "if each.gathering is gathering and each.found]",
        "if each is leads]",
        (TARGET_OF_SEVERAL,),
    ),
    Sabotage(
        "target batch: of several optimizers each decides when to average",
        "src/ragtag/training/optimizer/gathering.py",
        "        if self._leads is not pile:\n            return False\n",
        "        known = self._leads = pile\n",
        (TARGET_OF_SEVERAL,),
    ),
    Sabotage(
        "target batch: an average in another optimizer's step leaves its mean in the gradients",
        "src/ragtag/training/optimizer/averaged.py",
        "                parameter.grad = gradient\n",
        "                pass\n",
        (TARGET_OF_SEVERAL, "-k", "stays_there"),
    ),
    Sabotage(
        "target batch: beside another target, or a schedule that waits, there is nothing to say",
        "src/ragtag/training/optimizer/averaged.py",
        "            self._siblings.require(self)\n",
        "            pass\n",
        (TARGET_OF_SEVERAL, "-k", "refused"),
    ),
    Sabotage(
        "links: what a train holds is believed to be of the peer that it names",
        "src/ragtag/network/link/kernels.py",
        "fine &= headers[i, 0] >> _HALF & _U16 == sender",
        "fine |= headers[i, 0] >> _HALF & _U16 == sender",
        ("tests/network/test_frame.py", "-k", "trains_are_whole"),
    ),
    Sabotage(
        "links: compiled headers carry the weight of the next chunk",
        "src/ragtag/network/link/kernels.py",
        "np.uint64(bits[i]) << _HALF | total, heard[i]",
        "np.uint64(bits[i - 1]) << _HALF | total, heard[i]",
        ("tests/network/test_frame.py", "-k", "chunks_anywhere or what_arrives"),
    ),
    Sabotage(
        "comparisons: peers wait in them before they begin the next step",
        "src/ragtag/training/exchange/aligned.py",
        "        self.aligner.begin(outcome)\n",
        "        self.aligner.begin(outcome)\n        self.aligner.finish()\n",
        ("tests/training/test_align.py", "-k", "beside_the_next_step"),
    ),
    Sabotage(
        "comparisons: what they came to is taken after late rows were added",
        "src/ragtag/training/exchange/sparse.py",
        "        self._finish()\n        self._take(outcome.round, outcome.gathered)\n",
        "        self._take(outcome.round, outcome.gathered)\n        self._finish()\n",
        ("tests/training/test_late.py",),
    ),
    Sabotage(
        "comparisons: the last one is dropped as training ends",
        "src/ragtag/training/optimizer/averaged.py",
        "            aligner.finish()\n",
        "            pass\n",
        ("tests/training/test_bypass.py", "-k", "stay_together"),
    ),
    Sabotage(
        "newcomers: what members took from others is left out",
        "src/ragtag/training/state/follower.py",
        "        self._put(mean.patch)\n",
        "",
        ("tests/training/test_align.py", "-k", "who_comes_late_takes"),
    ),
    Sabotage(
        "newcomers: a mean counts though they were in no comparison before it",
        "src/ragtag/training/align/aligner.py",
        "return () if self._number(round_ - 1) is None else None",
        "return ()",
        ("tests/training/test_replay.py", "-k", "members_compared"),
    ),
    Sabotage(
        "replicas: each peer counts the comparisons that it was in",
        "src/ragtag/training/align/aligner.py",
        "return self._transport.offer(self._channel, rows, 1.0, deadline_s, number=number)",
        "return self._transport.offer(self._channel, rows, 1.0, deadline_s)",
        ("tests/training/test_align.py", "-k", "after_a_freeze_no_comparison"),
    ),
    Sabotage(
        "replicas: in calm rounds the same part of a large model is looked at each time",
        "src/ragtag/training/align/aligner.py",
        "return (number if sooner else calm) % self._turns",
        "return number % self._turns",
        ("tests/training/test_align_plan.py", "-k", "number_of_a_comparison"),
    ),
    Sabotage(
        "replicas: comparisons in calm rounds have other numbers than the same ones after a spoilt round",
        "src/ragtag/training/align/aligner.py",
        "return whole * self._looks + since // self._sooner",
        "return (round_ + 1) // (self._sooner if since else self.every)",
        ("tests/training/test_align_plan.py", "-k", "number_of_a_comparison"),
    ),
    Sabotage(
        "rows: a round that its trainer numbers is the newest that is heard of",
        AT_ONCE,
        "heard = -1 if self._numbered else self.highest",
        "heard = self.highest",
        ("tests/protocols/test_gather.py", "-k", "trainer_numbers"),
    ),
    Sabotage(
        "rows: a peer gives nothing after numbers that its trainer left out",
        AT_ONCE,
        "0 if self._numbered else number - self.done - 1",
        "number - self.done - 1",
        ("tests/protocols/test_gather.py", "-k", "trainer_numbers"),
    ),
    Sabotage(
        "rows: after numbers that its trainer left out a peer takes itself for no owner",
        AT_ONCE,
        "number - 1 - CATCH_UP and not self._numbered",
        "number - 1 - CATCH_UP",
        ("tests/protocols/test_gather.py", "-k", "trainer_numbers"),
    ),
    Sabotage(
        "trace: comparisons are told of the round after which they began, which is over",
        "src/ragtag/app/crew/logbook.py",
        "found is self._aligned.get(averaged.channel)",
        "averaged.outcome is None or found.round != averaged.outcome.round",
        ("tests/app/crew/test_logbook.py", "-k", "comparison"),
    ),
    Sabotage(
        "target batch: what an owner that died was given is lost",
        "src/ragtag/training/exchange/asked.py",
        "carries=asked.target is not None",
        "carries=False",
        (TARGET, "-k", "owner_that_died"),
    ),
    Sabotage(
        "all-reduce: an answer may take as long as the averager is patient",
        "src/ragtag/protocols/rounds/progress.py",
        "return max(self._usual_s, self.begun.answer_s)",
        "return max(self.begun.gather_s, self.begun.answer_s)",
        ("tests/protocols/test_asking.py", "-k", "however_patient"),
    ),
    Sabotage(
        "all-reduce: the next peer takes the blocks of all dead ones before it",
        "src/ragtag/protocols/rounds/layout.py",
        "return _alive(tuple(range(n)), live, present, auxiliary, _heirs)",
        "return _alive(tuple(range(n)), live, present, auxiliary, _next_of)",
        ("tests/protocols/test_layout.py",),
    ),
    Sabotage(
        "recipes: a NaN among seeds is no error",
        "src/ragtag/recipes/base.py",
        "return max(found) if found and not any(map(math.isnan, found)) else math.nan",
        "return max((x for x in found if x == x), default=0.0)",
        ("tests/recipes/test_base.py",),
    ),
    Sabotage(
        "reproduce kfac: crews that never come to the target are as quick as one another",
        "src/ragtag/recipes/kfac/recipe.py",
        "run.reached if run.reached <= plan.fewer else math.inf for run in runs",
        "run.reached for run in runs",
        ("tests/recipes/test_kfac.py", "-k", "never_come"),
    ),
    Sabotage(
        "reproduce topk: what is lost is cleared with tickets, and comes back without",
        "src/ragtag/recipes/topk/training.py",
        "heard if setup.tickets else np.ones_like(heard)",
        "np.ones_like(heard) if setup.tickets else heard",
        ("tests/recipes/test_topk.py", "-k", "tickets_only"),
    ),
    Sabotage(
        "rounds: a peer waits in one that most have left, as they do for it in the next",
        AT_ONCE,
        "return most and self.rounds[self.active].is_left()",
        "return False",
        ("tests/protocols/test_node.py", "-k", "most_have_left"),
    ),
    Sabotage(
        "rounds: one peer in the next is enough to leave one",
        AT_ONCE,
        "most = 2 * len(self._in_next & waiting) > len(waiting)",
        "most = bool(self._in_next & waiting)",
        ("tests/protocols/test_node.py", "-k", "most_have_left"),
    ),
    Sabotage(
        "rounds: what a peer was to take only counts in the round to which it moves on",
        AT_ONCE,
        "begun_s, ask, self._taking = self._given",
        "begun_s, ask, _ = self._given",
        ("tests/protocols/test_node.py", "-k", "most_have_left"),
    ),
    Sabotage(
        "rounds: a peer moves on in a channel that each step has, too",
        AT_ONCE,
        "gathers or self._serves or self._crew.steps.has(self._number):",
        "gathers or self._serves:",
        ("tests/protocols/test_node.py", "-k", "most_have_left"),
    ),
    Sabotage(
        "rounds: rows of the state after a round are moved on to a later one",
        AT_ONCE,
        "if self._channel.averager.gathers or self._serves or self._crew.steps.has(self._number):",
        "if self._serves or self._crew.steps.has(self._number):",
        ("tests/protocols/test_node.py", "-k", "of_another_channel"),
    ),
    Sabotage(
        "rounds: what is due is moved on to a later round",
        AT_ONCE,
        "if self._given is None or self._given[1].due >= self.active:",
        "if self._given is None:",
        ("tests/protocols/test_node.py", "-k", "of_another_channel"),
    ),
    Sabotage(
        "rounds: one peer alone is believed that all shares went to it",
        "src/ragtag/protocols/rounds/stages.py",
        "if stage == GATHER and self._elsewhere and self.told:",
        "if stage == GATHER and self._elsewhere:",
        ("tests/protocols/test_node.py", "-k", "half_of_them"),
    ),
    Sabotage(
        "rounds: shares that went to another owner are waited for",
        "src/ragtag/protocols/rounds/stages.py",
        "self._elsewhere[block] = self._elsewhere.get(block, 0) | roll",
        "pass",
        ("tests/protocols/test_node.py", "-k", "half_of_them"),
    ),
    Sabotage(
        "rounds: an owner of rows does not see that another decides on them",
        "src/ragtag/protocols/rounds/gather.py",
        "if stage == GATHER and self.spec.owners[block] == self.spec.me:",
        "if False:",
        ("tests/protocols/test_node.py", "-k", "so_are_rows"),
    ),
    Sabotage(
        "steps: rounds that are followed are steps",
        "src/ragtag/protocols/channel/at_once.py",
        "steps.begins(self._number, number, ask.weight > 0)",
        "steps.begins(self._number, number)",
        ("tests/training/test_back_again.py",),
    ),
    Sabotage(
        "abreast: a peer that was away averages before it has the state",
        "src/ragtag/training/state/abreast.py",
        "if kept is not None and last is not None and self._is_behind():",
        "if False:",
        ("tests/training/test_back_again.py",),
    ),
    Sabotage(
        "abreast: one that is behind is waited for in channels of which it follows no rounds",
        "src/ragtag/protocols/crew/standing.py",
        "if behind and behind.get(channel, AWAY) == AWAY)",
        "if False)",
        ("tests/training/test_back_again.py",),
    ),
    Sabotage(
        "rounds: one that was away for long takes itself for an owner",
        AT_ONCE,
        "live = live - {self.me} or live",
        "pass",
        ("tests/protocols/test_node.py", "-k", "average_comes_whole"),
    ),
    Sabotage(
        "rounds: one owner that has ended a round is enough to leave it out",
        "src/ragtag/protocols/rounds/stages.py",
        "return bool(self.tellers) and 2 * len(self.tellers) >= len(self.content.owners())",
        "return bool(self.tellers)",
        ("tests/protocols/test_node.py", "-k", "half_of_the_owners"),
    ),
    Sabotage(
        "rounds: a peer may begin any number of rounds too late",
        "src/ragtag/protocols/channel/at_once.py",
        "behind = self._behind or skipped > 0 or self._tardy > TARDY_MAX",
        "behind = self._behind or skipped > 0",
        ("tests/protocols/test_node.py", "-k", "too_late_again"),
    ),
    Sabotage(
        "rounds: where most are missing, they are asked in the smallest crews only",
        "src/ragtag/protocols/rounds/progress.py",
        "        effects += self._ask(self.until_s)\n",
        "        if len(self.waited_for) > 2:\n            return effects\n"
        "        effects += self._ask(self.until_s)\n",
        ("tests/protocols/test_early.py", "-k", "line_parts or last_one"),
    ),
    Sabotage(
        "rounds: most that are out of reach are taken for late, though they did not answer",
        "src/ragtag/protocols/channel/presence.py",
        "set(waited) - unanswered if",
        "set(waited) if",
        ("tests/protocols/test_early.py", "-k", "line_parts"),
    ),
    Sabotage(
        "rounds: a peer that begins last asks nobody where two are missing",
        "src/ragtag/protocols/rounds/progress.py",
        "            self._of[peer] += 1\n            return\n",
        "            return\n",
        ("tests/protocols/test_cut_off.py", "-k", "begins_last"),
    ),
    Sabotage(
        "groups: a second member is waited for no longer than others",
        "src/ragtag/protocols/groups/host.py",
        "return self.wait.longest_s() +",
        "return self.wait.typical_s() +",
        (
            "tests/protocols/test_host.py",
            "tests/simulation/test_trial.py",
            "-k",
            "second_member or out_of_step",
        ),
    ),
    Sabotage(
        "groups: a host that is alone is believed no longer than one that is not",
        "src/ragtag/protocols/groups/channel.py",
        "WAIT_MAX * (self._host.alone_s() +",
        "WAIT_MAX * (self._host.wait_s() +",
        ("tests/protocols/test_groups.py", "-k", "second_member"),
    ),
    Sabotage(
        "groups: a round's longest time leaves out how long a host alone waits",
        "src/ragtag/protocols/groups/channel.py",
        "(self._host.wait.longest_s() + answer_s",
        "(self._host.wait.typical_s() + answer_s",
        ("tests/protocols/test_groups.py", "-k", "second_member"),
    ),
    Sabotage(
        "groups: others are waited for as long as a second member",
        "src/ragtag/protocols/groups/host.py",
        "elif len(batch.wanted) == 1:",
        "elif len(batch.wanted) < 1:",
        ("tests/protocols/test_host.py", "-k", "second_member"),
    ),
    Sabotage(
        "rounds: answers are not heeded where another question would come too late",
        "src/ragtag/protocols/rounds/progress.py",
        "        if at_s >= self.until_s:\n            return []\n        self._next = name, at_s\n",
        "        self._next = name, at_s\n        if at_s >= self.until_s:\n            return []\n",
        ("tests/protocols/test_progress.py", "-k", "answers_are_due"),
    ),
    Sabotage(
        "rounds: a peer that hears nothing asks nobody before its deadline",
        "src/ragtag/protocols/rounds/progress.py",
        "return effects if self._few == _ASKING else self._arm(now_s, 0, self._pause_s)",
        "return effects",
        ("tests/protocols/test_cut_off.py",),
    ),
    Sabotage(
        "rounds: peers that were cut off teach the others to find out as late",
        "src/ragtag/protocols/channel/budgets.py",
        "min(self.scatter.middle_s(), APART * self.computed_s)",
        "self.scatter.middle_s()",
        ("tests/protocols/test_cut_off.py", "-k", "often"),
    ),
    Sabotage(
        "rounds: a fast peer asks slow ones all the time",
        "src/ragtag/protocols/rounds/progress.py",
        "self._pause_s *= 2.0",
        "pass",
        ("tests/protocols/test_cut_off.py", "-k", "seldom"),
    ),
    Sabotage(
        "rounds: answers are judged by an earlier question's time",
        "src/ragtag/protocols/rounds/progress.py",
        "return name == due and now_s >= at_s",
        "return True",
        ("tests/protocols/test_asking.py", "-k", "goes_elsewhere"),
    ),
    Sabotage(
        "rounds: an average is waited for no longer where its owner asks a silent peer later",
        "src/ragtag/protocols/rounds/progress.py",
        "self.begun.gather_s + others_s",
        "self.begun.gather_s",
        ("tests/protocols/test_node.py", "-k", "freezes_before"),
    ),
    Sabotage(
        "rounds: a channel's first round waits as long as the channel was open",
        "src/ragtag/protocols/channel/at_once.py",
        "now_s - max(self._ready_s, self._crew.met_s)",
        "now_s - self._ready_s",
        ("tests/protocols/test_node.py", "-k", "first_round_of_a_channel"),
    ),
    Sabotage(
        "sparse: averages of whole models are numbered by each peer for itself",
        "src/ragtag/training/exchange/sparse.py",
        "self._whole.average(weight, deadline_s, number=number)",
        "self._whole.average(weight, deadline_s)",
        ("tests/training/test_sparse.py", "-k", "same_average_of_whole"),
    ),
    Sabotage(
        "rounds: a peer that others have outrun takes no notice of it",
        "src/ragtag/protocols/channel/at_once.py",
        "self._behind = bool(self._ahead) or self._outrun",
        "self._behind = bool(self._ahead)",
        ("tests/protocols/test_node.py", "-k", "waits_for_nobody_that_is_a_round_ahead"),
    ),
    Sabotage(
        "rounds: deadlines grow by peers that wait for each other",
        "src/ragtag/protocols/channel/budgets.py",
        "most_s = min(most_s, self._most_s(stage), max(",
        "most_s = min(most_s, max(",
        ("tests/protocols/test_node.py", "-k", "teach_no_more"),
    ),
    Sabotage(
        "waiting rules: a rule is left out by a name that nothing reads",
        "benchmarks/waiting_rules.py",
        '*(layout, "_heirs", lambda _: layout._next_of)',
        '*(layout, "_next_of", lambda _: layout._next_of)',
        ("tests/protocols/test_waiting_rules.py", "-k", "heirs"),
    ),
    Sabotage(
        "waiting rules: all rules stay when one is left out",
        "benchmarks/waiting_rules.py",
        "    with RULES[name].left_out() if name else nullcontext():",
        "    with nullcontext():",
        ("tests/protocols/test_waiting_rules.py", "-k", "red_without and witnesses"),
    ),
    Sabotage(
        "rounds: a question does not tell which round others are in",
        "src/ragtag/protocols/channel/at_once.py",
        "            self._believes(number, (run,))\n            machine",
        "            machine",
        ("tests/protocols/test_asking.py", "-k", "made_up"),
    ),
    Sabotage(
        "each datagram wakes the driver",
        "src/ragtag/network/driver/engine.py",
        "self._gathering = taken.amid",
        "self._gathering = False",
        ("tests/network/test_driver.py", "-k", "one_by_one"),
    ),
    Sabotage(
        "the end of a message is waited with",
        "src/ragtag/network/link/inbox.py",
        "0 < len(rows) < TRAIN and not ended",
        "0 < len(rows) < TRAIN",
        ("tests/network/test_outbox.py", "-k", "amid_a_message"),
    ),
    Sabotage(
        "auxiliaries: a slow peer is silent after a round trip",
        "src/ragtag/protocols/channel/at_once.py",
        "        if self._serves:  # copies are all",
        "        if False:  # copies are all",
        ("tests/training/test_planning.py", "-k", "unlike_lines"),
    ),
    Sabotage(
        "rate control: a path that looks for its round trip leaves busy ends nothing",
        "src/ragtag/network/control/bbr.py",
        "little = _WINDOW[Probe.PROBE_RTT] * self.product + self._rate() * self.kept_s",
        "little = _WINDOW[Probe.PROBE_RTT] * self.product",
        ("tests/network/test_bbr.py", "-k", "lies_at_busy_ends"),
    ),
    Sabotage(
        "rate control: a window without twice what ends keep",
        "src/ragtag/network/control/bbr.py",
        "_WINDOW[self.phase] * self.part * (self.product + self._rate() * self.kept_s)",
        "_WINDOW[self.phase] * self.part * self.product + self._rate() * self.kept_s",
        ("tests/network/test_bbr.py", "-k", "keep_answers"),
    ),
    Sabotage(
        "rate control: rates of one train, where paths take turns",
        "src/ragtag/network/control/path.py",
        "_SPAN_TRAINS * self.control.train_s",
        "_SPAN_TRAINS * QUANTUM_S",
        ("tests/network/test_bbr.py", "-k", "take_turns"),
    ),
    Sabotage(
        "silence: what a link held back teaches the timeout each time",
        PATH,
        "            if told:\n",
        "            if told and False:\n",
        ("tests/network/test_control.py", "-k", "outage_kept_back"),
    ),
    Sabotage(
        "silence: its rate is the path's",
        PATH,
        "if left.at_s < self._silent_until_s:",
        "if left.at_s < -self._silent_until_s:",
        ("tests/network/test_control.py", "-k", "over_a_silence"),
    ),
    Sabotage(
        "rate control: what was overtaken is lost",
        "src/ragtag/network/control/bbr.py",
        "newest = round_ if round_ > self._until else round_ - _SETTLED_ROUNDS",
        "newest = round_",
        ("tests/network/test_bbr.py", "-k", "overtaken or reorders"),
    ),
    Sabotage(
        "rate control: losses that have come leave their mark",
        "src/ragtag/network/control/bbr.py",
        "if before.came >= before.lost / 2.0:",
        "if before.came > 2.0 * before.lost:",
        ("tests/network/test_bbr.py", "-k", "overtaken or reorders"),
    ),
    Sabotage(
        "rate control: bursts are chance's",
        "src/ragtag/network/control/bbr.py",
        "self.bursts * (1.0 / seen.passed",
        "(1.0 / seen.passed",
        ("tests/network/test_bbr.py", "-k", "bursts or reorders"),
    ),
    Sabotage(
        "rate control: a mark that is sent again is more to send",
        "src/ragtag/network/link/outbox.py",
        "flow.path.send(now_s, 1)\n        if not flow.queue:",
        "flow.path.send(now_s, 1)\n        if False:",
        ("tests/network/test_outbox.py", "-k", "sent_again"),
    ),
    Sabotage(
        "meetings: pauses grow though the other is heard",
        "src/ragtag/protocols/crew/meet.py",
        "pause_s = self._pause_s[peer] = self._first_pause_s(peer)",
        "pause_s = self._pause_s[peer]",
        ("tests/protocols/test_meet.py", "-k", "told_again"),
    ),
    Sabotage(
        "meetings: what is to be told to a peer that is back is dropped",
        "src/ragtag/protocols/node.py",
        "effects = self._miss(self._meetings.tell(now_s, event))",
        "effects = self._miss(self._meetings.tell(now_s, event))[:0]",
        ("tests/protocols/test_meet.py", "-k", "comes_back"),
    ),
    Sabotage(
        "meetings: nobody is asked for what it has told once",
        "src/ragtag/protocols/crew/meet.py",
        "for peer in sorted(self._unmet()):",
        "for peer in sorted(self._expected - self._acked):",
        ("tests/protocols/test_meet.py", "-k", "comes_back"),
    ),
    Sabotage(
        "probes: nobody is asked before the deadline",
        "src/ragtag/protocols/channel/at_once.py",
        "usual_gather_s=INITIAL_RTO_S if self._channel.passing else",
        "usual_gather_s=",
        ("tests/protocols/test_asking.py", "-k", "probe"),
    ),
    Sabotage(
        "probes: rounds are not told that all have met",
        "src/ragtag/protocols/channel/at_once.py",
        "met=self._channel.passing",
        "met=False",
        ("tests/protocols/test_asking.py", "-k", "probe"),
    ),
    Sabotage(
        "probes: a peer that the others had in their second goes on to one by itself",
        "src/ragtag/protocols/crew/joining.py",
        "if event.round < LAST_PROBE:",
        "if self._first_took_s is None:",
        ("tests/protocols/test_joining.py", "-k", "probing"),
    ),
    Sabotage(
        "board: the posts of a peer that is back are forgotten",
        "src/ragtag/protocols/crew/board.py",
        "if not same:",
        "if True:",
        ("tests/protocols/test_board.py", "-k", "taken_for_dead"),
    ),
    Sabotage(
        "finish: each counts on whom it saw end",
        "src/ragtag/app/crew/finish.py",
        "    ended = _agreed(transport, ended, deadline_s)\n",
        "",
        ("tests/app/crew/test_finish.py", "-k", "stood_still_as_others_ended"),
    ),
    Sabotage(
        "transport: the probes of all channels are one channel's",
        "src/ragtag/protocols/crew/joining.py",
        'channel_of(f"{channel}/probe")',
        'channel_of("probe")',
        ("tests/app/crew/test_transport.py", "-k", "still_need_repairs"),
    ),
    Sabotage(
        "joining: a claim to a seat stands by the first guess of a period",
        "src/ragtag/protocols/membership/roster.py",
        "        self.until_s = self._since_s + self._periods * period_s\n        if",
        "        if",
        ("tests/protocols/test_roster.py", "-k", "is_known_when"),
    ),
    Sabotage(
        "joining: a claim is not looked at again when its time is shorter",
        "src/ragtag/protocols/crew/joining.py",
        'return [self._arm("seat", seating.until_s)] if seating.until_s != until_s else []',
        "return []",
        ("tests/protocols/test_joining.py", "-k", "known_to_be_shorter"),
    ),
    Sabotage(
        "newcomers: one that comes at the others' end begins at round 0",
        "src/ragtag/training/state/abreast.py",
        "            transport.goes_on_after(channel, self._counted)",
        "            pass",
        ("tests/training/test_abreast.py", "-k", "at_their_end"),
    ),
    Sabotage(
        "central state: lost chunks are asked for at the pace of when the channel was opened",
        "src/ragtag/protocols/central/server.py",
        "self._rtts_s.get(peer, self._rtt_s)",
        "self._rtt_s",
        ("tests/protocols/test_centre.py", "-k", "pace_of_the_way"),
    ),
    Sabotage(
        "central state: holes of an update are asked for as often in each round trip",
        "src/ragtag/protocols/rounds/repair.py",
        "self.at_s, self.wait_s = now_s, 2.0 * self.wait_s",
        "self.at_s = now_s",
        ("tests/protocols/test_centre.py", "-k", "pace_of_the_way"),
    ),
    Sabotage(
        "driver: a channel opened anew hears of the rounds before",
        "src/ragtag/network/driver/engine.py",
        "for entry in self._timers if entry[2].channel != number]",
        "for entry in self._timers]",
        ("tests/network/test_driver.py", "-k", "opened_anew"),
    ),
    Sabotage(
        "rate control: short messages correct no rate",
        "src/ragtag/network/control/bbr.py",
        "if sample.at_least > self.bandwidth:",
        "if sample.at_least > math.inf:",
        ("tests/network/test_bbr.py", "-k", "short_messages"),
    ),
    Sabotage(
        "rate control: copies for all that was ever lost",
        PATH,
        "passed - (self.received - before), within=_RECENT)",
        "passed - (self.received - before))",
        ("tests/network/test_control.py", "-k", "bad_seconds or begins_to_lose"),
    ),
    Sabotage(
        "bounded staleness: a peer that comes back is waited for until it has made up what it missed",
        "src/ragtag/training/optimizer/speeds.py",
        "steps[peer] = row.steps + without",
        "steps[peer] = row.steps",
        ("tests/training/test_slow.py", "-k", "frozen_peer"),
    ),
    Sabotage(
        "bounded staleness: what a peer took over with another's state counts twice",
        "src/ragtag/training/optimizer/speeds.py",
        "min(self._without.get(peer, 0), max(0, self._steps - row.steps))",
        "self._without.get(peer, 0)",
        ("tests/training/test_pace.py", "-k", "comes_back"),
    ),
    Sabotage(
        "quorum: a peer without a weight is one of it",
        PROGRESS,
        "len(self.counted - _peers(self.owed))",
        "len(self.gave - _peers(self.owed))",
        ("tests/protocols/test_quorum.py", "-k", "without_a_weight"),
    ),
    Sabotage(
        "carried gradients: sums are of the gradient's own type",
        "src/ragtag/training/exchange/dense.py",
        "(tensor.float() * self._weight)",
        "(tensor * self._weight)",
        ("tests/training/test_align.py", "-k", "carried"),
    ),
    Sabotage(
        "central barrier: one that has given and is gone takes the place of one that is to come",
        "src/ragtag/protocols/central/gate.py",
        "len(come.union(held.accepted, gives))",
        "len(come.union(gives))",
        ("tests/protocols/test_centre_parts.py", "-k", "barrier"),
    ),
    Sabotage(
        "central barrier: one that comes back takes the place of one that is to come",
        "src/ragtag/protocols/central/gate.py",
        "len(come.union(held.accepted, gives))",
        "len(come.union(held.accepted))",
        ("tests/protocols/test_centre_parts.py", "-k", "barrier"),
    ),
    Sabotage(
        "K-FAC: gradients travel in mixed chunks",
        "src/ragtag/training/kfac.py",
        "by is not None and by.hadamard",
        "by is None",
        ("tests/training/test_kfac.py", "-k", "mixed_chunks"),
    ),
    Sabotage(
        "K-FAC: a layer that a peer does not run counts there as what it was",
        "src/ragtag/optim/kfac/preconditioner.py",
        "            if layer.folded > before[layer.name]\n",
        "",
        ("tests/training/test_kfac.py", "-k", "counts_at_the_peers"),
    ),
    Sabotage(
        "K-FAC: a factor is over all peers, also those that do not give it",
        "src/ragtag/training/kfac.py",
        "mean[name] / count",
        "mean[name]",
        ("tests/training/test_kfac.py", "-k", "counts_at_the_peers"),
    ),
    Sabotage(
        "K-FAC: an owner that never ran a layer does not decompose it",
        "src/ragtag/optim/kfac/preconditioner.py",
        "                layer.folded = max(layer.folded, 1)  # by others' passes\n",
        "",
        ("tests/training/test_kfac.py", "-k", "counts_at_the_peers"),
    ),
)


def copied(to: Path) -> None:
    """Copy what the tests need into a folder, which is made where it is not there."""
    to.mkdir(exist_ok=True)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, to / name)


def passes(tree: Path, tests: Sequence[str], hangs: bool = False) -> tuple[bool, str]:
    """Whether pytest passes in a tree, and the last line of what it said.

    Raises TimeoutError: a test ran out of time; with ``hangs`` it has failed.
    """
    paths = os.pathsep.join((str(tree / "src"), str(tree)))
    where = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", *tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=where, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{' '.join(tests)} took longer than {LIMIT_S:g} s") from error
    if OUT_OF_TIME in done.stdout and not hangs:
        raise TimeoutError(f"{' '.join(tests)} ran out of time")
    said = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode not in (0, 1):  # no test, or pytest itself failed: nothing has been shown
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {said[-1:] or done.stderr}")
    return done.returncode == 0, said[-1] if said else ""


def applied(tree: Path, one: Sabotage) -> str:
    """Break the code of a tree. Returns what the file was. Raises ValueError: its text is not there once."""
    path = tree / one.file
    text = path.read_text("utf-8")
    if text.count(one.text) != 1:
        raise ValueError(f"{one.name}: {one.file} has its text {text.count(one.text)} times; it must be once")
    path.write_text(text.replace(one.text, one.by), "utf-8")
    return text


class Workbench:
    """Copies of the tree, one for each case that runs beside others."""

    def __init__(self, folder: Path, n: int) -> None:
        self._free: Queue[Path] = Queue()
        for number in range(n):
            copied(folder / str(number))
            self._free.put(folder / str(number))

    def hold(self, tests: tuple[str, ...], cases: Sequence[Sabotage]) -> list[tuple[int, str]]:
        """What becomes of cases that the same tests must notice: an exit status and a line for each."""
        tree = self._free.get()
        try:
            if not passes(tree, tests)[0]:
                return [(2, f"BROKEN    {one.name}: {' '.join(tests)} fails without it") for one in cases]
            return [self._tried(tree, one) for one in cases]
        except (TimeoutError, RuntimeError) as error:
            return [(2, f"BROKEN    {one.name}: without it {error}") for one in cases]
        finally:
            self._free.put(tree)

    def _tried(self, tree: Path, one: Sabotage) -> tuple[int, str]:
        try:
            before = applied(tree, one)
        except ValueError as error:
            return 2, f"BROKEN    {error}"
        try:
            green, said = passes(tree, one.tests, one.hangs)
        except (TimeoutError, RuntimeError) as error:
            return 2, f"BROKEN    {one.name}: {error}"
        finally:
            (tree / one.file).write_text(before, "utf-8")
        return int(green), f"{'UNNOTICED' if green else 'red      '} {one.name}: {said}"


def main(arguments: Sequence[str]) -> int:
    """Run the sabotages whose names have all of the words given, as many at a time as there are cores."""
    chosen = [one for one in SABOTAGES if all(word in one.name for word in arguments)]
    by_tests: dict[tuple[str, ...], list[Sabotage]] = {}
    for one in chosen:
        by_tests.setdefault(one.tests, []).append(one)
    n, worst, began_s = min(os.cpu_count() or 1, max(1, len(by_tests))), 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(n) as pool:
        bench = Workbench(Path(folder), n)
        for done in as_completed([pool.submit(bench.hold, *entry) for entry in by_tests.items()]):
            for status, line in done.result():
                worst = max(worst, status)
                print(line, flush=True)
    print(f"{len(chosen)} sabotages in {(time.monotonic() - began_s) / 60:.1f} minutes")
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
