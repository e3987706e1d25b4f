"""The client of a Stenograph server, for trainers and harnesses. It needs aiohttp and NumPy alone."""

from stenograph.client.client import Client as Client
from stenograph.client.errors import AgentFailure as AgentFailure
from stenograph.client.errors import BadPayload as BadPayload
from stenograph.client.errors import ClientError as ClientError
from stenograph.client.errors import InfraFailure as InfraFailure
from stenograph.client.errors import ServerFault as ServerFault
from stenograph.client.errors import ServerRefused as ServerRefused
from stenograph.client.errors import ServerUnreachable as ServerUnreachable
from stenograph.client.errors import SessionGone as SessionGone
from stenograph.client.errors import TryLater as TryLater
from stenograph.client.errors import WrongKey as WrongKey
from stenograph.client.errors import WrongRequest as WrongRequest
from stenograph.client.progress import BatchProgress as BatchProgress
from stenograph.client.progress import PrintedProgress as PrintedProgress
from stenograph.client.progress import silent as silent
from stenograph.client.rollouts import Rollout as Rollout
from stenograph.client.rollouts import RolloutBatch as RolloutBatch
from stenograph.client.rollouts import RolloutGroup as RolloutGroup
from stenograph.client.samples import DecodedSample as DecodedSample
from stenograph.client.samples import DecodedSamples as DecodedSamples
from stenograph.client.samples import VersionSpan as VersionSpan
from stenograph.client.samples import decoded as decoded
from stenograph.client.session import RolloutSession as RolloutSession
from stenograph.client.sync import SyncClient as SyncClient
from stenograph.client.sync import SyncRolloutSession as SyncRolloutSession
