; Household rules of generated games. Their semantics are those of ALFWorld's games (held against them by the
; differential test); the names of predicates and actions are theirs, so that their tools can read these games.
(define (domain alfred)
  (:requirements :adl :typing)
  (:types agent location receptacle object rtype otype)
  (:predicates
    (atLocation ?a - agent ?l - location) (receptacleAtLocation ?r - receptacle ?l - location)
    (objectAtLocation ?o - object ?l - location) (inReceptacle ?o - object ?r - receptacle)
    (receptacleType ?r - receptacle ?t - rtype) (objectType ?o - object ?t - otype) (canContain ?rt - rtype ?ot - otype)
    (holds ?a - agent ?o - object) (holdsAny ?a - agent) (openable ?r - receptacle) (opened ?r - receptacle)
    (isReceptacleObject ?o - object) (inReceptacleObject ?inner - object ?outer - object)
    (pickupable ?o - object) (cleanable ?o - object) (heatable ?o - object) (coolable ?o - object)
    (toggleable ?o - object) (sliceable ?o - object)
    (isClean ?o - object) (isHot ?o - object) (isCool ?o - object) (isToggled ?o - object) (isSliced ?o - object)
    (checked ?anything))

  ; Looking changes nothing; `checked` is there because a planner drops actions without effects.
  (:action look
    :parameters (?a - agent ?l - location)
    :precondition (atLocation ?a ?l)
    :effect (checked ?l))
  (:action inventory
    :parameters (?a - agent)
    :effect (checked ?a))
  (:action help
    :parameters (?a - agent)
    :effect (checked ?a))
  (:action examineReceptacle
    :parameters (?a - agent ?l - location ?r - receptacle)
    :precondition (and (atLocation ?a ?l) (receptacleAtLocation ?r ?l))
    :effect (checked ?r))
  (:action examineObject
    :parameters (?a - agent ?o - object)
    :precondition (holds ?a ?o)
    :effect (checked ?o))

  (:action GotoLocation
    :parameters (?a - agent ?lStart - location ?lEnd - location ?r - receptacle)
    :precondition (and (not (= ?lStart ?lEnd)) (atLocation ?a ?lStart) (receptacleAtLocation ?r ?lEnd))
    :effect (and (not (atLocation ?a ?lStart)) (atLocation ?a ?lEnd)))
  (:action OpenObject
    :parameters (?a - agent ?l - location ?r - receptacle)
    :precondition (and (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (openable ?r) (not (opened ?r)))
    :effect (opened ?r))
  (:action CloseObject
    :parameters (?a - agent ?l - location ?r - receptacle)
    :precondition (and (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (openable ?r) (opened ?r))
    :effect (not (opened ?r)))
  (:action PickupObject
    :parameters (?a - agent ?l - location ?o - object ?r - receptacle)
    :precondition (and (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (inReceptacle ?o ?r) (pickupable ?o)
                       (not (holdsAny ?a)) (or (opened ?r) (not (openable ?r))))
    :effect (and (holds ?a ?o) (holdsAny ?a) (not (inReceptacle ?o ?r)) (not (objectAtLocation ?o ?l))))
  (:action PutObject
    :parameters (?a - agent ?l - location ?o - object ?r - receptacle ?ot - otype ?rt - rtype)
    :precondition (and (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (holds ?a ?o) (or (opened ?r) (not (openable ?r)))
                       (objectType ?o ?ot) (receptacleType ?r ?rt) (canContain ?rt ?ot))
    :effect (and (inReceptacle ?o ?r) (objectAtLocation ?o ?l) (not (holds ?a ?o)) (not (holdsAny ?a))))

  ; Doors need not be open for these three.
  (:action CleanObject
    :parameters (?a - agent ?l - location ?r - receptacle ?o - object)
    :precondition (and (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (holds ?a ?o) (cleanable ?o)
                       (or (receptacleType ?r SinkBasinType) (receptacleType ?r SinkType)))
    :effect (isClean ?o))
  (:action HeatObject
    :parameters (?a - agent ?l - location ?r - receptacle ?o - object)
    :precondition (and (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (holds ?a ?o) (heatable ?o)
                       (receptacleType ?r MicrowaveType))
    :effect (and (isHot ?o) (not (isCool ?o))))
  (:action CoolObject
    :parameters (?a - agent ?l - location ?r - receptacle ?o - object)
    :precondition (and (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (holds ?a ?o) (coolable ?o)
                       (receptacleType ?r FridgeType))
    :effect (and (isCool ?o) (not (isHot ?o))))
  (:action ToggleObject
    :parameters (?a - agent ?l - location ?o - object ?r - receptacle)
    :precondition (and (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (inReceptacle ?o ?r) (toggleable ?o))
    :effect (isToggled ?o))
  (:action SliceObject
    :parameters (?a - agent ?l - location ?co - object ?ko - object)
    :precondition (and (atLocation ?a ?l) (objectAtLocation ?co ?l) (sliceable ?co) (holds ?a ?ko)
                       (or (objectType ?ko KnifeType) (objectType ?ko ButterKnifeType)))
    :effect (isSliced ?co)))
