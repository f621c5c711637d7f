//! Creates named tuples of classes of the Python code.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyType};

/// A class of named tuples.
pub struct NamedTuple {
    class: Py<PyType>,
    /// `tuple.__new__`, which creates a named tuple of its class and a tuple of its fields. It does not count them.
    new: Py<PyAny>,
}

impl NamedTuple {
    /// Takes a class. Raises `ValueError` if it has other fields than the caller will give.
    pub fn new(class: &Bound<'_, PyType>, expected: &[&str]) -> PyResult<Self> {
        let found: Vec<String> = class.getattr("_fields")?.extract()?;
        if found != expected {
            let text = format!("{} has the fields {found:?}; expected {expected:?}", class.name()?);
            return Err(PyValueError::new_err(text));
        }
        let new = class.py().get_type::<PyTuple>().getattr("__new__")?.unbind();
        Ok(Self { class: class.clone().unbind(), new })
    }

    /// Creates a named tuple. `fields` are in the order that was given to `new`.
    pub fn create<'py>(
        &self,
        py: Python<'py>,
        fields: impl IntoPyObject<'py, Target = PyTuple, Output = Bound<'py, PyTuple>, Error = PyErr>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.new.bind(py).call1((&self.class, fields.into_pyobject(py)?))
    }
}
