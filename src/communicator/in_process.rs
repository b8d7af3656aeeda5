//! Ranks that are threads of one process.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::deadline::Deadline;
use super::{Communicator, staged};
use crate::base::error::{Error, Result};
use crate::ops::Device;

/// A rank of a group in one process: a thread each, with any device each, such as CUDA, wgpu and the CPU together. Bytes go through the
/// host.
///
/// A rank that is dropped, because its thread returned or panicked, is an error on the others as soon as they need it.
///
/// ```
/// use std::time::Duration;
/// use wgpu_mla::communicator::{Communicator, InProcess};
/// use wgpu_mla::cpu::Cpu;
///
/// # fn main() -> wgpu_mla::Result<()> {
/// let group = InProcess::group(3, Duration::from_secs(5))?;
/// std::thread::scope(|scope| {
///     for rank in group {
///         scope.spawn(move || {
///             let communicator: &dyn Communicator<Cpu> = &rank;
///             let mine = [communicator.rank() as u8; 2];
///             assert_eq!(communicator.all_gather_host(&mine).expect("all came"), [0, 0, 1, 1, 2, 2]);
///         });
///     }
/// });
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct InProcess {
    rank: u32,
    group: Arc<Group>,
}

#[derive(Debug)]
struct Group {
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    ranks: Vec<Seat>,
    /// Ranks that have read what all gave in this round.
    readers: usize,
    /// Why the group is of no use any more: the same for all.
    broken: Option<String>,
}

#[derive(Debug, Clone, Default)]
struct Seat {
    /// What the rank gives in this round.
    given: Option<(&'static str, Arc<[u8]>)>,
    /// How it left, if it did.
    left: Option<&'static str>,
}

impl InProcess {
    /// A group of so many ranks; hand each to a thread of its own. `timeout` is how long a rank waits for the others in one exchange:
    /// more than the slowest rank's work between two of them. With [`Duration::MAX`] it waits until the others come or leave.
    ///
    /// # Errors
    /// [`Error::Shape`] for no ranks, or more than 65,536.
    pub fn group(world: u32, timeout: Duration) -> Result<Vec<Self>> {
        super::check_world(world)?;
        let ranks = vec![Seat::default(); world as usize];
        let state = State { ranks, readers: 0, broken: None };
        let group = Arc::new(Group { timeout, state: Mutex::new(state), changed: Condvar::new() });
        Ok((0..world).map(|rank| Self { rank, group: group.clone() }).collect())
    }

    /// Gives bytes to all ranks and takes those of all, in the order of the ranks.
    fn meet(&self, what: &'static str, mine: &[u8]) -> Result<Vec<Arc<[u8]>>> {
        let deadline = Deadline::after(self.group.timeout);
        let failed = |detail| Error::Exchange { what, rank: self.rank, detail };
        let me = self.rank as usize;
        // The round before is over once every rank has read it.
        let last_is_read = |state: &State| state.ranks[me].given.is_none();
        let mut state = self.wait_until(deadline, what, last_is_read).map_err(failed)?;
        state.ranks[me].given = Some((what, mine.into()));
        drop(state);
        self.group.changed.notify_all();
        let all_gave = |state: &State| state.ranks.iter().all(|rank| rank.given.is_some());
        let mut state = self.wait_until(deadline, what, all_gave).map_err(failed)?;
        let given: Vec<_> = state.ranks.iter().filter_map(|rank| rank.given.clone()).collect();
        state.readers += 1;
        if state.readers == given.len() {
            state.readers = 0;
            state.ranks.iter_mut().for_each(|rank| rank.given = None);
            self.group.changed.notify_all();
        }
        // All ranks see the same, and so all fail here, or none.
        let differs =
            given.iter().position(|(call, bytes)| (*call, bytes.len()) != (given[0].0, given[0].1.len()));
        if let Some(other) = differs {
            let said = |rank: usize| {
                format!("rank {rank} calls {} with {} bytes", given[rank].0, given[rank].1.len())
            };
            let why = format!("{}, {}", said(0), said(other));
            state.broken.get_or_insert(why.clone());
            return Err(failed(why));
        }
        Ok(given.into_iter().map(|(_, bytes)| bytes).collect())
    }

    /// Waits for the others.
    ///
    /// # Errors
    /// What keeps this from coming true: it breaks the group, so that all ranks say the same.
    fn wait_until(
        &self,
        deadline: Deadline,
        what: &str,
        done: impl Fn(&State) -> bool,
    ) -> Result<MutexGuard<'_, State>, String> {
        let mut state = self.group.lock();
        loop {
            if let Some(why) = &state.broken {
                return Err(why.clone());
            }
            if done(&state) {
                return Ok(state);
            }
            let missing = |rank: &Seat| rank.given.is_none();
            let gone = state.ranks.iter().enumerate().find(|(_, rank)| missing(rank) && rank.left.is_some());
            let why = match gone {
                Some((rank, Seat { left, .. })) => {
                    format!("rank {rank} {} before its {what}", left.unwrap_or_default())
                }
                None if deadline.is_over() => {
                    let late = state.ranks.iter().enumerate().filter(|(_, rank)| missing(rank));
                    let late: Vec<_> = late.map(|(rank, _)| rank.to_string()).collect();
                    format!("rank {} did not come to {what} within {:?}", late.join(", "), self.group.timeout)
                }
                None => {
                    let changed = &self.group.changed;
                    state = match deadline.left() {
                        Some(left) => {
                            changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                        }
                        None => changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                    };
                    continue;
                }
            };
            state.broken = Some(why.clone());
            self.group.changed.notify_all();
            return Err(why);
        }
    }
}

impl Group {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        let how = if std::thread::panicking() { "panicked" } else { "left" };
        self.group.lock().ranks[self.rank as usize].left = Some(how);
        self.group.changed.notify_all();
    }
}

impl<D: Device> Communicator<D> for InProcess {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn world(&self) -> u32 {
        self.group.lock().ranks.len() as u32
    }

    fn all_gather_host(&self, mine: &[u8]) -> Result<Vec<u8>> {
        Ok(self.meet("all_gather", mine)?.concat())
    }

    fn all_to_all_host(&self, parts: &[u8]) -> Result<Vec<u8>> {
        let part = staged::part_bytes(Communicator::<D>::world(self), parts.len())?;
        let mine = self.rank as usize * part;
        let all = self.meet("all_to_all", parts)?;
        Ok(all.iter().map(|of_rank| &of_rank[mine..mine + part]).collect::<Vec<_>>().concat())
    }
}
