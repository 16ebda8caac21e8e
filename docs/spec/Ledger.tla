------------------------------- MODULE Ledger -------------------------------
(***************************************************************************)
(* The staleness ledger: which groups may be generated under which model   *)
(* version, and when a step may train.                                     *)
(*                                                                         *)
(* Version t is the model after t updates.  Step t trains BatchSize groups *)
(* and makes version t + 1.  A group is as old as its oldest token, and it *)
(* may be trained at most MaxStaleness steps later: that is its deadline.  *)
(*                                                                         *)
(*  Reserve -> in flight -> Occupy -> complete -> Take -> leased -> Commit *)
(*                |                    |  ^     Consume     |              *)
(*                +----- Release ------+  +---- Rollback ---+              *)
(*                                                                         *)
(* The protocol has one rule: do it only if every live group can still be  *)
(* trained by its deadline.  Here the rule is written as what it means, an *)
(* assignment of groups to steps that exists.  The code counts instead;    *)
(* that both are the same protocol is tested, not assumed.                 *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, TLC

CONSTANTS
  Groups,        \* names; a name is used again once its group is gone: a finite pool for endless prompts
  BatchSize,     \* groups that a step trains
  MaxStaleness,  \* steps that may lie between a group's version and its training
  Redundancy,    \* groups that are admitted for each step beyond BatchSize, and may be given up
  MaxVersion,    \* where a behaviour ends, so that there are finitely many states
  Failures       \* how often Lower, Renew, Release and Rollback may happen, in all: without limit no step need end

ASSUME
  /\ IsFiniteSet(Groups)
  /\ Cardinality(Groups) >= BatchSize  \* fewer names could not fill a step
  /\ BatchSize \in Nat \ {0}
  /\ {MaxStaleness, Redundancy, MaxVersion, Failures} \subseteq Nat

VARIABLES
  version,    \* updates done: the newest version
  place,      \* where each group is
  oldest,     \* the version of each group's oldest token
  admitted, committed, released,  \* groups so far, for the balance
  failed      \* failures so far

vars == <<version, place, oldest, admitted, committed, released, failed>>

Versions == 0..MaxVersion
None == -1  \* the version of a free name
Places == BatchSize + Redundancy
Deadline(old, g) == old[g] + MaxStaleness

-----------------------------------------------------------------------------
(* Sets and steps.  `where` is a value of `place`, the present one or one  *)
(* that is only considered.                                                *)

In(where, state) == {g \in Groups : where[g] = state}
Leased(where) == In(where, "leased")
Waiting(where) == In(where, "in flight") \cup In(where, "complete")
Live(where) == Waiting(where) \cup Leased(where)

\* A full step awaits its commit; the next step is open already, but nothing is leased to it before that commit.
Full(where) == Cardinality(Leased(where)) = BatchSize
Frontier(where) == IF Full(where) THEN version + 1 ELSE version
Taken(where) == IF Full(where) THEN 0 ELSE Cardinality(Leased(where))

(***************************************************************************)
(* The rule: there is an assignment of all waiting groups to steps, none   *)
(* after its deadline and no more to a step than it has places.            *)
(***************************************************************************)
Schedulable(where, old) ==
  LET open == Frontier(where)
      steps == open .. (version + MaxStaleness)  \* no deadline is later
      room(step) == IF step = open THEN Places - Taken(where) ELSE Places
  IN  \E step \in [Waiting(where) -> steps] :
        /\ \A g \in Waiting(where) : step[g] <= Deadline(old, g)
        /\ \A s \in steps : Cardinality({g \in Waiting(where) : step[g] = s}) <= room(s)

-----------------------------------------------------------------------------
(* Admission                                                               *)

Init ==
  /\ version = 0
  /\ place = [g \in Groups |-> "free"]
  /\ oldest = [g \in Groups |-> None]
  /\ admitted = 0 /\ committed = 0 /\ released = 0 /\ failed = 0

\* Before the group's first token, which will be of version v: one that was made already.
Reserve(g, v) ==
  /\ place[g] = "free" /\ v <= version
  /\ place' = [place EXCEPT ![g] = "in flight"]
  /\ oldest' = [oldest EXCEPT ![g] = v]
  /\ Schedulable(place', oldest')
  /\ admitted' = admitted + 1
  /\ UNCHANGED <<version, committed, released, failed>>

\* One of the finitely many things that may go against progress.
Fail == failed < Failures /\ failed' = failed + 1

\* A member is about to run on an older version.
Lower(g, v) ==
  /\ Fail
  /\ place[g] = "in flight" /\ v < oldest[g]
  /\ oldest' = [oldest EXCEPT ![g] = v]
  /\ Schedulable(place, oldest')
  /\ UNCHANGED <<version, place, admitted, committed, released>>

\* No token older than v is left.  Needs no test: a later deadline allows every assignment that there was.
Renew(g, v) ==
  /\ Fail
  /\ place[g] = "in flight" /\ v > oldest[g] /\ v <= version
  /\ oldest' = [oldest EXCEPT ![g] = v]
  /\ UNCHANGED <<version, place, admitted, committed, released>>

-----------------------------------------------------------------------------
(* Completion                                                              *)

Occupy(g) ==
  /\ place[g] = "in flight"
  /\ place' = [place EXCEPT ![g] = "complete"]
  /\ UNCHANGED <<version, oldest, admitted, committed, released, failed>>

\* Aborted, filtered or failed.
Release(g) ==
  /\ Fail
  /\ g \in Waiting(place)
  /\ place' = [place EXCEPT ![g] = "free"]
  /\ oldest' = [oldest EXCEPT ![g] = None]
  /\ released' = released + 1
  /\ UNCHANGED <<version, admitted, committed>>

-----------------------------------------------------------------------------
(* Consumption                                                             *)

\* Of the complete groups in `where`, those in `going` have the earliest deadlines.
EarliestOf(where, going) ==
  \A g \in going, other \in In(where, "complete") \ going : oldest[g] <= oldest[other]

\* Streamed: one group goes to the open step.  The rule protects the groups in flight that may need the place.
\* It does so for the last place as well, so that a step which must give groups up is left to Consume.
Take(g) ==
  /\ ~Full(place)
  /\ place[g] = "complete" /\ EarliestOf(place, {g})
  /\ place' = [place EXCEPT ![g] = "leased"]
  /\ Schedulable(place', oldest)
  /\ UNCHANGED <<version, oldest, admitted, committed, released, failed>>

Filled(where, going, gone) ==
  [g \in Groups |-> IF g \in going THEN "leased" ELSE IF g \in gone THEN "free" ELSE where[g]]

\* What may be given up so that `going` can fill the open step: as few groups as possible, and of those choices
\* one with the fewest complete groups.  Which groups in flight, of equally many, is left to the caller.
Surplus(where, going) ==
  LET size(gone) == Cardinality(gone)
      done(gone) == Cardinality(gone \cap In(where, "complete"))
      enough == {gone \in SUBSET (Waiting(where) \ going) :
                   size(gone) <= Redundancy /\ Schedulable(Filled(where, going, gone), oldest)}
      better(a, b) == size(a) < size(b) \/ (size(a) = size(b) /\ done(a) < done(b))
  IN  {gone \in enough : ~\E other \in enough : better(other, gone)}

\* The complete groups that may fill the open step together.
Batches(where) ==
  IF Full(where) THEN {}
  ELSE {going \in SUBSET In(where, "complete") :
          Cardinality(going) = BatchSize - Taken(where) /\ EarliestOf(where, going)}

Consume ==
  \E going \in Batches(place) : \E gone \in Surplus(place, going) :
    /\ place' = Filled(place, going, gone)
    /\ oldest' = [g \in Groups |-> IF g \in gone THEN None ELSE oldest[g]]
    /\ released' = released + Cardinality(gone)
    /\ UNCHANGED <<version, admitted, committed, failed>>

\* The new version is durable.
Commit ==
  /\ Full(place)
  /\ version < MaxVersion
  /\ version' = version + 1
  /\ place' = [g \in Groups |-> IF g \in Leased(place) THEN "free" ELSE place[g]]
  /\ oldest' = [g \in Groups |-> IF g \in Leased(place) THEN None ELSE oldest[g]]
  /\ committed' = committed + Cardinality(Leased(place))
  /\ UNCHANGED <<admitted, released, failed>>

\* The trainer died, with the step full or partly taken.
Rollback ==
  /\ Fail
  /\ Leased(place) # {}
  /\ place' = [g \in Groups |-> IF g \in Leased(place) THEN "complete" ELSE place[g]]
  /\ UNCHANGED <<version, oldest, admitted, committed, released>>

Next ==
  \/ \E g \in Groups, v \in Versions : Reserve(g, v) \/ Lower(g, v) \/ Renew(g, v)
  \/ \E g \in Groups : Occupy(g) \/ Release(g) \/ Take(g)
  \/ Consume
  \/ Commit
  \/ Rollback

\* What the system owes: prompts are admitted while they can be, groups in flight finish, a ready step is trained
\* and its version published.  It need not stream, and nothing need fail.
Fairness ==
  /\ WF_vars(\E g \in Groups, v \in Versions : Reserve(g, v))
  /\ WF_vars(\E g \in Groups : Occupy(g))
  /\ WF_vars(Consume)
  /\ WF_vars(Commit)

Spec == Init /\ [][Next]_vars /\ Fairness

-----------------------------------------------------------------------------
(* What is promised in every state                                         *)

TypeOK ==
  /\ version \in 0..MaxVersion
  /\ place \in [Groups -> {"free", "in flight", "complete", "leased"}]
  /\ oldest \in [Groups -> {None} \cup 0..version]
  /\ \A g \in Groups : place[g] = "free" <=> oldest[g] = None
  /\ Cardinality(Leased(place)) <= BatchSize
  /\ failed \in 0..Failures

\* No leased group is past its deadline, and none that waits will be when its turn comes.
Bound ==
  /\ \A g \in Leased(place) : version <= Deadline(oldest, g)
  /\ \A g \in Waiting(place) : Frontier(place) <= Deadline(oldest, g)

\* The rule holds always, also after the steps that do not test it.
EveryGroupHasAStep == Schedulable(place, oldest)

NothingLost ==
  /\ admitted = Cardinality(Live(place)) + committed + released
  /\ committed = BatchSize * version

\* If everything in flight completes, the open step can be filled; if there is too little for that, more is admitted.
NeverStuck ==
  LET done == [g \in Groups |-> IF place[g] = "in flight" THEN "complete" ELSE place[g]]
      free == In(place, "free")
  IN  \/ Full(place)
      \/ IF Cardinality(Live(place)) >= BatchSize
         THEN \E going \in Batches(done) : Surplus(done, going) # {}
         ELSE \A g \in free : Schedulable([done EXCEPT ![g] = "in flight"], [oldest EXCEPT ![g] = version])

\* With the bound 0 it is the synchronous loop: nothing is generated or kept while a step trains.
Synchronous == MaxStaleness = 0 /\ Full(place) => Waiting(place) = {}

-----------------------------------------------------------------------------
(* What is promised of every transition and of every behaviour.  Which     *)
(* groups were trained, at which step and how old, is a fact about the     *)
(* commit, so it is stated there; a record of it would multiply the states.*)

\* A commit trains exactly BatchSize groups, none too old, makes the next version, and touches no other group.
CommitsAreExact ==
  [][committed' # committed =>
       /\ version' = version + 1
       /\ committed' - committed = BatchSize
       /\ Cardinality(Leased(place)) = BatchSize
       /\ \A g \in Leased(place) : version - oldest[g] <= MaxStaleness /\ place'[g] = "free"
       /\ \A g \in Groups \ Leased(place) : place'[g] = place[g] /\ oldest'[g] = oldest[g]]_vars

\* Nothing but a commit makes a version, and no version is taken back.
VersionsAreCommitted == [][version' # version => committed' # committed]_vars

\* Every step is trained in the end.
Progress == \A v \in 0..(MaxVersion - 1) : version = v ~> version = v + 1

\* Names mean nothing: a symmetry for the configurations that check no liveness.
Anonymous == Permutations(Groups)
=============================================================================
