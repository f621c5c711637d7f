//! Work in the threads of a pool, whose result is taken later.

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use rayon::ThreadPool;

/// Work that has begun. Nothing waits for it if its result is not taken.
pub struct Job<R> {
    state: Mutex<State<R>>,
    done: Condvar,
}

enum State<R> {
    Running,
    Done(thread::Result<R>),
    Taken,
}

impl<R: Send + 'static> Job<R> {
    /// Begins the work in a thread of the pool.
    pub fn begin(pool: &ThreadPool, work: impl FnOnce() -> R + Send + 'static) -> Arc<Self> {
        let job = Arc::new(Job { state: Mutex::new(State::Running), done: Condvar::new() });
        let running = Arc::clone(&job);
        pool.spawn(move || {
            // A panic goes on where the result is taken.
            let result = catch_unwind(AssertUnwindSafe(work));
            *running.lock() = State::Done(result);
            running.done.notify_all();
        });
        job
    }

    /// Waits until the result is there.
    pub fn wait(&self) {
        drop(self.done_state());
    }

    /// Waits for the result, or the panic, and returns it. `None` if it has been taken.
    pub fn take(&self) -> Option<thread::Result<R>> {
        match std::mem::replace(&mut *self.done_state(), State::Taken) {
            State::Done(result) => Some(result),
            _ => None,
        }
    }

    fn done_state(&self) -> MutexGuard<'_, State<R>> {
        let waited = self.done.wait_while(self.lock(), |state| matches!(state, State::Running));
        waited.unwrap_or_else(PoisonError::into_inner)
    }

    /// No code panics while it holds the lock.
    fn lock(&self) -> MutexGuard<'_, State<R>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool() -> ThreadPool {
        rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap()
    }

    #[test]
    fn result_is_taken_once() {
        let job = Job::begin(&pool(), || 7);
        job.wait();
        assert_eq!(job.take().unwrap().unwrap(), 7);
        job.wait();
        assert!(job.take().is_none());
    }

    #[test]
    fn work_goes_on_while_nobody_waits() {
        let (sender, receiver) = std::sync::mpsc::channel::<u8>();
        let job = Job::begin(&pool(), move || receiver.recv().unwrap());
        sender.send(1).unwrap();
        assert_eq!(job.take().unwrap().unwrap(), 1);
    }

    #[test]
    fn panic_is_the_result() {
        let job = Job::begin(&pool(), || panic!("asked for"));
        let panic = job.take().unwrap().unwrap_err();
        assert_eq!(*panic.downcast::<&str>().unwrap(), "asked for");
    }
}
