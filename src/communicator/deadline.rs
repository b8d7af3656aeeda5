//! When a wait for other ranks is over.

use std::time::{Duration, Instant};

/// A point in time; none where it is too far off to be one, as after [`Duration::MAX`].
#[derive(Debug, Clone, Copy)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    pub fn after(timeout: Duration) -> Self {
        Self(Instant::now().checked_add(timeout))
    }

    /// What is left until then, at least 0; `None` where it never comes.
    pub fn left(self) -> Option<Duration> {
        self.0.map(|at| at.saturating_duration_since(Instant::now()))
    }

    pub fn is_over(self) -> bool {
        self.left().is_some_and(|left| left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_too_far_off_never_comes() {
        assert!(Deadline::after(Duration::MAX).left().is_none());
        assert!(!Deadline::after(Duration::MAX).is_over());
        assert!(!Deadline::after(Duration::from_secs(60)).is_over());
        assert!(Deadline::after(Duration::ZERO).is_over());
    }
}
