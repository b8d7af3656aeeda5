//! The locks of std's names, on pthread's, which ThreadSanitizer knows. std's own are in a library that is not instrumented.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;

unsafe extern "C" {
    fn pthread_mutex_lock(mutex: *mut c_void) -> c_int;
    fn pthread_mutex_unlock(mutex: *mut c_void) -> c_int;
    fn pthread_cond_wait(cond: *mut c_void, mutex: *mut c_void) -> c_int;
    fn pthread_cond_broadcast(cond: *mut c_void) -> c_int;
}

/// Room for either of glibc's objects, which are zeros at first.
#[derive(Default)]
struct Raw(Box<UnsafeCell<[u64; 8]>>);

impl Raw {
    fn get(&self) -> *mut c_void {
        self.0.get().cast()
    }
}

#[derive(Default)]
pub struct Mutex<T>(Raw, UnsafeCell<T>);
// SAFETY: the lock orders what uses the value.
unsafe impl<T: Send> Sync for Mutex<T> {}
// SAFETY: the value moves with it, and the lock is in a box.
unsafe impl<T: Send> Send for Mutex<T> {}

pub struct MutexGuard<'a, T>(&'a Mutex<T>);

type Locked<'a, T> = Result<MutexGuard<'a, T>, PoisonError<MutexGuard<'a, T>>>;

impl<T> Mutex<T> {
    pub fn new(value: T) -> Self {
        Self(Raw::default(), UnsafeCell::new(value))
    }

    pub fn lock(&self) -> Locked<'_, T> {
        // SAFETY: zeros are an initialised lock.
        assert_eq!(unsafe { pthread_mutex_lock(self.0.get()) }, 0);
        Ok(MutexGuard(self))
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the lock is held.
        unsafe { &*self.0.1.get() }
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the lock is held.
        unsafe { &mut *self.0.1.get() }
    }
}

impl<T> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        // SAFETY: this thread holds it.
        unsafe { pthread_mutex_unlock(self.0.0.get()) };
    }
}

#[derive(Default)]
pub struct Condvar(Raw);
// SAFETY: pthread's is for several threads.
unsafe impl Sync for Condvar {}
// SAFETY: it is in a box.
unsafe impl Send for Condvar {}

impl Condvar {
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> Locked<'a, T> {
        // SAFETY: this thread holds the lock.
        unsafe { pthread_cond_wait(self.0.get(), guard.0.0.get()) };
        Ok(guard)
    }

    pub fn notify_all(&self) {
        // SAFETY: zeros are an initialised condition.
        unsafe { pthread_cond_broadcast(self.0.get()) };
    }
}
